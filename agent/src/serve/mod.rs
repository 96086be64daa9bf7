//! HTTP: /metrics, /healthz, /readyz and the landing page.
