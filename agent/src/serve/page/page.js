// Draws the status page from /api/status, every two seconds while somebody looks. Series are kept here, not in the agent.
"use strict";

const EVERY = 2000; // ms between looks
const POINTS = 150; // of a series: five minutes
const WINDOW = 15; // looks that a rate is taken over
const history = []; // the last looks, oldest first
const series = new Map(); // key -> numbers or null
let paused = false;
let focused = null; // key of the focused node: a redraw must not lose it

const $ = (id) => document.getElementById(id);

/** An element with properties and children; text stays text, whatever a name from a container is. */
function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "title", "polyline", "polygon", "tspan"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// ---- figures

const whole = (n) => (n === null || n === undefined ? "–" : n.toLocaleString("en", { maximumFractionDigits: 0 }));
const short = (n) => {
  if (n === null || n === undefined || !Number.isFinite(n)) return "–";
  if (n === 0) return "0";
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (n >= limit) return `${(n / (unit === "k" ? 1e3 : limit)).toPrecision(3)}${unit}`;
  return n >= 100 ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2);
};
const seconds = (s) => {
  if (s === null || s === undefined || !Number.isFinite(s)) return "–";
  if (s < 1e-3) return `${(s * 1e6).toFixed(0)} µs`;
  return s < 1 ? `${(s * 1e3).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
};
const bytes = (b) => {
  if (b === null || b === undefined || !Number.isFinite(b)) return "–";
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (b >= size) return `${(b / size).toPrecision(3)} ${unit}`;
  return `${b.toFixed(0)} B`;
};
const percent = (p) => (p === null || p === undefined ? "–" : `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`);

// ---- samples

const matches = (sample, labels) => Object.entries(labels).every(([key, value]) => sample.labels[key] === value);
const of = (look, family, labels) => (look.families[family] || []).filter((sample) => matches(sample, labels));
const sum = (look, family, labels) => {
  const found = of(look, family, labels);
  return found.length ? found.reduce((total, sample) => total + sample.value, 0) : null;
};
/** Count, sum and buckets of a histogram's children together; null without observations. */
function observed(look, family, labels) {
  const found = of(look, family, labels);
  if (!found.length) return null;
  const counts = found[0].counts.map((_, at) => found.reduce((total, sample) => total + (sample.counts[at] || 0), 0));
  return { counts, n: counts.reduce((a, b) => a + b, 0), sum: found.reduce((total, sample) => total + sample.sum, 0) };
}
const last = () => history[history.length - 1];
const before = () => history[Math.max(0, history.length - 1 - WINDOW)];
const elapsed = () => (last().time_ms - before().time_ms) / 1000;
function rate(family, labels) {
  const now = sum(last(), family, labels);
  if (now === null || elapsed() <= 0) return null;
  return Math.max(0, now - (sum(before(), family, labels) || 0)) / elapsed();
}
/** Observations since the earlier look. */
function recent(family, labels) {
  const now = observed(last(), family, labels);
  if (now === null || elapsed() <= 0) return null;
  const then = observed(before(), family, labels);
  const counts = now.counts.map((count, at) => count - (then ? then.counts[at] : 0));
  return { counts, n: now.n - (then ? then.n : 0), sum: now.sum - (then ? then.sum : 0), all: now };
}
/** Mean of the recent observations, or of all where there are none. */
function mean(family, labels) {
  const found = recent(family, labels);
  if (found === null || found.all.n === 0) return null;
  return found.n > 0 ? found.sum / found.n : found.all.sum / found.all.n;
}
/** A quantile of the recent observations, inside its bucket by a straight line. */
function quantile(family, labels, q) {
  const found = recent(family, labels);
  if (found === null || found.n <= 0) return null;
  const bounds = last().bounds[family];
  let below = 0;
  for (let at = 0; at < found.counts.length; at++) {
    const count = found.counts[at];
    if (below + count >= q * found.n) {
      const low = at ? bounds[at - 1] : 0;
      if (at >= bounds.length) return low;
      return low + ((bounds[at] - low) * (q * found.n - below)) / Math.max(count, 1);
    }
    below += count;
  }
  return null;
}

// ---- parts of the page

function figure(key, title, value, format, help) {
  const points = series.get(key) || [];
  if (!paused) {
    points.push(value);
    if (points.length > POINTS) points.shift();
    series.set(key, points);
  }
  const top = Math.max(...points.map((p) => p || 0), 1e-9);
  // A minute at least, then what there is.
  const room = Math.max(points.length, 60000 / EVERY);
  const at = (p, i) => `${i + room - points.length},${(27 - (25 * (p || 0)) / top).toFixed(1)}`;
  // What was not known is not drawn.
  const first = points.findIndex((p) => p !== null);
  const line = first < 0 ? "" : points.map(at).slice(first).join(" ");
  const area = first < 0 ? "" : `${first + room - points.length},28 ${line} ${room - 1},28`;
  return element("div", { class: "figure", title: help },
    element("dt", {}, title),
    element("dd", {}, format(value)),
    element("svg", { viewBox: `0 0 ${room - 1} 28`, preserveAspectRatio: "none", role: "img",
        "aria-label": `${title} over the last minutes, at most ${format(top < 1e-8 ? 0 : top)}` },
      element("polygon", { class: "under", points: area }),
      element("polyline", { class: "spark", points: line })));
}

function table(caption, heads, rows) {
  const cell = (kind, text, at) => element(kind, { class: typeof heads[at] === "object" ? heads[at].class : undefined }, text);
  const name = (head) => (typeof head === "object" ? head.name : head);
  return element("div", { class: "scroll" }, element("table", {},
    element("caption", { hidden: "" }, caption),
    element("thead", {}, element("tr", {}, ...heads.map((head, at) => cell("th", name(head), at)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text, at) => cell("td", text, at)))))));
}
const number = (name) => ({ name, class: "number" });

/** `details` that stay open over redraws. */
const open = new Set();
function fold(key, title, ...content) {
  const made = element("details", open.has(key) ? { open: "" } : {}, element("summary", { "data-key": key }, title), ...content);
  made.addEventListener("toggle", () => (made.open ? open.add(key) : open.delete(key)));
  return made;
}

// ---- a pipeline

const place = (stage, replica) => `${stage ?? "?"}.${replica ?? "?"}`;

function edges(pipeline) {
  const labels = { model_name: pipeline.model };
  const found = new Map();
  for (const { labels: l } of of(last(), "vllm_omni:transfer_size_bytes", labels)) {
    const edge = { from_stage: l.from_stage, from_replica: l.from_replica, to_stage: l.to_stage, to_replica: l.to_replica };
    const at = { ...labels, ...edge };
    const seen = recent("vllm_omni:transfer_size_bytes", at);
    found.set(JSON.stringify(edge), {
      ...edge,
      from: place(l.from_stage, l.from_replica),
      to: place(l.to_stage, l.to_replica),
      total: seen ? seen.all.n : 0,
      rate: seen ? seen.n / elapsed() : null,
      size: mean("vllm_omni:transfer_size_bytes", at),
      tx: mean("vllm_omni:transfer_tx_s", at),
      flight: mean("vllm_omni:transfer_in_flight_s", at),
      rx: mean("vllm_omni:transfer_rx_s", at),
    });
  }
  return [...found.values()];
}

const WIDE = 168, HIGH = 78, GAP = 150, UP = 26;

function node(pipeline, key, x, y, kind, title, all, share) {
  const lines = all.filter((line) => line);
  const label = [title, ...lines].join(", ");
  const made = element("g", { class: `node ${kind}`, tabindex: "0", role: "img", "aria-label": label, "data-key": key },
    element("title", {}, label),
    element("rect", { class: "box", x, y, width: WIDE, height: HIGH, rx: 8 }),
    element("text", { class: "name", x: x + 12, y: y + 21 }, title),
    ...lines.map((line, at) => element("text", { class: "small", x: x + 12, y: y + 39 + 15 * at }, line)));
  if (share !== null && share !== undefined) {
    const full = share > 0.95 ? " full" : "";
    made.append(element("rect", { class: "bar", x: x + 12, y: y + HIGH - 9, width: WIDE - 24, height: 4, rx: 2 }),
      element("rect", { class: `fill${full}`, x: x + 12, y: y + HIGH - 9, width: Math.max(0, (WIDE - 24) * share), height: 4, rx: 2 }));
  }
  return made;
}

function edge(from, to, kind, title, text) {
  const [x1, y1, x2, y2] = [from.x + WIDE, from.y + HIGH / 2, to.x - 7, to.y + HIGH / 2];
  const bend = Math.abs(x2 - x1) / 2;
  // Two lines of text on the side that the edge does not come from.
  const beside = y2 < y1 ? [-23, -9] : y2 > y1 ? [17, 31] : [-9, 17];
  return element("g", { class: `edge ${kind}` },
    element("title", {}, title),
    element("path", { d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}` }),
    element("polygon", { class: "tip", points: `${x2},${y2 - 4} ${x2 + 7},${y2} ${x2},${y2 + 4}` }),
    ...text.map((line, at) => element("text", { x: x2 - 4, y: y2 + beside[at], "text-anchor": "end" }, line)));
}

function state(process) {
  if (process.ended) return "ended";
  const probes = Object.values(process.probes);
  return probes.length && probes.every((reason) => reason === null) ? "" : "unprobed";
}

function graph(pipeline, links) {
  const stages = new Map();
  const members = pipeline.processes.filter((p) => p.role === "stage" || p.role === "diffusion stage");
  for (const member of members) {
    const stage = member.stage ?? "?";
    if (!stages.has(stage)) stages.set(stage, []);
    stages.get(stage).push(member);
  }
  const order = (stage) => (stage === "?" ? Infinity : stage);
  const columns = [...stages.entries()].sort((a, b) => order(a[0]) - order(b[0]));
  const most = Math.max(1, ...columns.map(([, list]) => list.length));
  const height = most * (HIGH + UP) - UP + 32;
  const width = (columns.length + 1) * WIDE + columns.length * GAP + 4;
  const middle = (count) => (height - (count * (HIGH + UP) - UP)) / 2;
  const places = new Map();
  const nodes = [];
  const served = { model_name: pipeline.served ?? pipeline.model };
  const root = pipeline.processes.filter((p) => ["API server", "API worker", "headless launcher"].includes(p.role));
  nodes.push(node(pipeline, `${pipeline.id}/root`, 2, middle(1), `root ${root.length ? "" : "unprobed"}`,
    root[0]?.role ?? "root process", [`process ${pipeline.pid}`, root.length > 1 ? `${root.length} API processes` : ""]));
  columns.forEach(([stage, list], column) => {
    list.sort((a, b) => (a.replica ?? 0) - (b.replica ?? 0)).forEach((member, row) => {
      const labels = { ...served, stage: String(stage), replica: String(member.replica) };
      const x = (column + 1) * (WIDE + GAP) + 2, y = middle(list.length) + row * (HIGH + UP);
      const name = place(member.stage, member.replica);
      member.at = { x, y };
      places.set(name, member.at);
      const running = sum(last(), "vllm:num_requests_running", labels);
      const waiting = sum(last(), "vllm:num_requests_waiting", labels);
      const tokens = rate("vllm:generation_tokens_total", labels);
      const kv = sum(last(), "vllm:kv_cache_usage_perc", labels);
      const memory = sum(last(), "omnitap_gpu_stage_memory_used_bytes", { model_name: pipeline.model, stage: labels.stage, replica: labels.replica });
      const gpu = memory === null ? "" : `${bytes(memory)} of GPU memory`;
      const kind = member.role === "stage" ? "stage" : "diffusion";
      const lines = member.ended ? [`process ${member.pid} has ended`] : [
        running === null ? `process ${member.pid}` : `${whole(running)} running, ${whole(waiting)} waiting`,
        state(member) === "unprobed" ? "no probes" : tokens === null ? gpu : `${short(tokens)} tokens/s${memory === null ? "" : `, ${bytes(memory)}`}`,
      ];
      const title = member.stage === null ? `${kind}, number unknown` : `${kind} ${stage}, replica ${member.replica ?? "?"}`;
      nodes.push(node(pipeline, `${pipeline.id}/${member.pid}`, x, y, state(member), title, lines,
        member.ended ? null : kv));
    });
  });
  const drawn = links.flatMap((link) => {
    const [a, b] = [places.get(link.from), places.get(link.to)];
    if (!a || !b) return [];
    // Where several edges end in one place, the table tells them apart.
    const together = links.filter((other) => other.to === link.to);
    const total = together.reduce((all, other) => all + (other.rate ?? 0), 0);
    const text = together.length > 1
      ? [`${short(total)}/s`, `from ${together.length} replicas`]
      : [`${short(link.rate)}/s, ${bytes(link.size)}`, `${seconds(link.flight)} in flight`];
    const told = `${short(link.rate)} a second, ${bytes(link.size)}, ${seconds(link.flight)} in flight`;
    return [edge(a, b, link.rate > 0 ? "busy" : "", `${link.from} to ${link.to}: ${told}`, together[0] === link ? text : [])];
  });
  // The API server gives requests to the stages.
  const start = { x: 2, y: middle(1) };
  const given = (columns[0]?.[1] ?? []).map((member) =>
    edge(start, member.at, "given", "requests", []));
  return element("div", { class: "graph" },
    element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Stages, replicas and transfers" },
      ...given, ...drawn, ...nodes));
}

function sources(pipeline) {
  const found = of(last(), "omnitap_source_state", { pipeline: String(pipeline.id) });
  const groups = new Map();
  for (const sample of found) {
    const how = sample.value >= 1 ? "whole" : sample.value > 0 ? "parts missing" : "nothing to be had";
    const key = `${sample.labels.source}\u0000${how}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(sample.labels.family);
  }
  return [...groups.entries()].sort().map(([key, families]) => [...key.split("\u0000"), String(families.length), families.join(", ")]);
}

function card(pipeline) {
  const links = edges(pipeline);
  const omni = { model_name: pipeline.model };
  const served = { model_name: pipeline.served ?? pipeline.model };
  const k = (name) => `${pipeline.id}/${name}`;
  const pick = (a, b, labels) => (pipeline.omni ? a : b(labels));
  const figures = [
    figure(k("running"), "Running", pick(sum(last(), "vllm_omni:num_requests_running", omni), (l) => sum(last(), "vllm:num_requests_running", l), served), whole,
      "Requests that no scheduler reports as waiting"),
    figure(k("waiting"), "Waiting", pick(sum(last(), "vllm_omni:num_requests_waiting", omni), (l) => sum(last(), "vllm:num_requests_waiting", l), served), whole,
      "Requests that a scheduler reports as waiting"),
    figure(k("done"), "Requests/s", pick(rate("vllm_omni:requests_success_total", omni), (l) => rate("vllm:request_success_total", l), served), short,
      "Finished requests a second"),
    figure(k("tokens"), "Tokens/s", rate("vllm:generation_tokens_total", served), short, "Generated tokens a second, all stages"),
    figure(k("e2e"), "End to end, p95", pick(quantile("vllm_omni:e2e_request_latency_s", omni, 0.95), (l) => quantile("vllm:e2e_request_latency_seconds", l, 0.95), served),
      seconds, "95th percentile of the last half minute"),
  ];
  if (of(last(), "vllm_omni:audio_rtf", omni).length) {
    figures.push(
      figure(k("rtf"), "Real-time factor", mean("vllm_omni:audio_rtf", omni), short, "Mean; below 1 is faster than playback"),
      figure(k("ttfp"), "First audio, p95", quantile("vllm_omni:audio_ttfp_s", omni, 0.95), seconds, "From arrival to the first audio packet"));
  }
  if (of(last(), "vllm_omni:image_count_total", omni).length)
    figures.push(figure(k("images"), "Images/s", rate("vllm_omni:image_count_total", omni), short, "Images made a second"));
  if (of(last(), "vllm_omni:peak_memory_mb", omni).length)
    figures.push(figure(k("memory"), "Peak GPU memory", Math.max(...of(last(), "vllm_omni:peak_memory_mb", omni).map((s) => s.value)) * 1e6, bytes, "Highest of all stages"));
  const failed = sum(last(), "vllm_omni:requests_failed_total", omni);
  if (failed) figures.push(figure(k("failed"), "Failed/s", rate("vllm_omni:requests_failed_total", omni), short, `${failed} since the start`));

  const titled = pipeline.model ?? pipeline.served ?? "model unknown";
  const alias = pipeline.served && pipeline.served !== pipeline.model ? ` served as ${pipeline.served}` : "";
  const processes = pipeline.processes.map((p) => [
    p.role, place(p.stage, p.replica).replace("?.?", ""), String(p.pid),
    p.ended ? "ended" : Object.entries(p.probes).map(([set, reason]) => (reason === null ? set : `${set}: ${reason}`)).join(", ") || "none",
    p.container ? p.container.slice(0, 12) : "",
  ]);
  return element("article", { class: "card" },
    element("header", {}, element("h2", {}, titled, element("span", { class: "soft" }, alias)),
      element("span", { class: "soft" }, `${pipeline.software}, process ${pipeline.pid}`)),
    element("dl", { class: "figures" }, ...figures),
    graph(pipeline, links),
    links.length ? fold(k("transfers"), `Transfers (${links.length} ${links.length === 1 ? "edge" : "edges"})`, table("Transfers",
      ["from", "to", number("all"), number("a second"), number("mean size"), number("sending"), number("in flight"), number("receiving")],
      links.map((l) => [l.from, l.to, whole(l.total), short(l.rate), bytes(l.size), seconds(l.tx), seconds(l.flight), seconds(l.rx)]))) : null,
    fold(k("processes"), `Processes and probes (${processes.length})`, table("Processes", ["role", "stage.replica", "process", { name: "probes on", class: "wide" }, "container"], processes)),
    fold(k("sources"), "Sources of the families",
      element("p", { class: "soft" }, `Its own /metrics: ${pipeline.engine ?? "not read"}`), table("Sources", ["source", "state", number("families"), { name: "names", class: "wide" }], sources(pipeline))));
}

function empty(look) {
  const tap = look.tap === "off" ? "The tap is off (--no-ebpf), pipelines are found all the same." : "";
  return element("article", { class: "empty" },
    element("h2", {}, look.not_ready ? "Looking for pipelines" : "No pipeline found on this host"),
    element("p", {}, `omnitap looks for running vllm and vllm-omni servers, and finds new ones within a few seconds. ${tap}`),
    element("ul", {},
      element("li", {}, "Start one, such as ", element("code", {}, "vllm serve MODEL --omni"), ", or ", element("code", {}, "cargo xtask demo"), " for the bundled pipeline."),
      element("li", {}, "One is running? Then it may be in another PID namespace: the agent needs the host's (Kubernetes ", element("code", {}, "hostPID: true"), ", docker ", element("code", {}, "--pid=host"), ")."),
      element("li", {}, element("code", {}, "omnitap check"), " on this host says what is missing.")));
}

function agent(look) {
  const rss = sum(look, "omnitap_resident_memory_bytes", {});
  return element("article", { class: "card" },
    element("header", {}, element("h2", {}, "The agent itself"), element("span", { class: "soft" }, `tap ${look.tap}`)),
    element("dl", { class: "figures" },
      figure("agent/events", "Events/s", rate("omnitap_events_received_total", {}), short, "Read from the ring buffer"),
      figure("agent/probed", "Probed processes", sum(look, "omnitap_probed_processes", {}), whole, ""),
      figure("agent/cpu", "CPU", rate("omnitap_cpu_seconds_total", {}), percent, "Of a core"),
      figure("agent/memory", "Memory", rss, bytes, "Resident"),
      figure("agent/series", "Sample lines", sum(look, "omnitap_series", {}), whole, "On /metrics now")));
}

function draw() {
  const look = last();
  $("version").textContent = look.version;
  const ready = $("ready");
  ready.textContent = look.not_ready ? `not ready: ${look.not_ready}` : "ready";
  ready.className = `pill ${look.not_ready ? "bad" : "good"}`;
  $("warnings").hidden = !look.warnings.length;
  $("warnings").replaceChildren(...look.warnings.map((warning) => element("div", { class: "warning", role: "note" },
    element("p", {}, warning.text), element("p", { class: "soft" }, warning.remedy))));
  focused = document.activeElement?.dataset?.key ?? null;
  $("pipelines").replaceChildren(...(look.pipelines.length ? look.pipelines.map(card) : [empty(look)]));
  $("agent").hidden = false;
  $("agent").replaceChildren(agent(look));
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

async function look() {
  try {
    const answer = await fetch("api/status", { cache: "no-store" });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    history.push(await answer.json());
    if (history.length > WINDOW + 1) history.shift();
    draw();
  } catch (error) {
    $("ready").textContent = `no answer: ${error.message}`;
    $("ready").className = "pill bad";
  }
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").textContent = paused ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", String(paused));
});
// A page that nobody sees asks for nothing.
setInterval(() => { if (!paused && document.visibilityState === "visible") look(); }, EVERY);
look();
