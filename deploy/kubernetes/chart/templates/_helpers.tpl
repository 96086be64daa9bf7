{{- define "omnitap.selector" -}}
app.kubernetes.io/name: omnitap
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "omnitap.labels" -}}
{{ include "omnitap.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: omnitap
{{- end }}

{{- define "omnitap.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{- define "omnitap.probe" -}}
{{- if .root.Values.webConfig.clientCertificates -}}
{{- /* The kubelet has no client certificate. */ -}}
tcpSocket: {port: metrics}
{{- else -}}
httpGet: {path: {{ .path }}, port: metrics, scheme: {{ if .root.Values.webConfig.tls }}HTTPS{{ else }}HTTP{{ end }}}
{{- end -}}
{{- end }}

{{- define "omnitap.endpoint" -}}
port: metrics
path: /metrics
interval: {{ .interval }}
scheme: {{ if .root.Values.webConfig.tls }}https{{ else }}http{{ end }}
{{- with .root.Values.monitorAuth }}
{{ toYaml . }}
{{- end }}
relabelings:
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
{{- end }}
