// Shows the latest report of the gateway, and nothing older. All text is set as text, never as HTML:
// a backend's error message may hold anything.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const SILENT_MS = 15000; // a stream without a report for this long is dead
const SILENT = `no report for ${SILENT_MS / 1000} s`;
const LONGEST_WAIT_MS = 15000;

// --- elements -------------------------------------------------------------------------------------

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}
const h = (tag, attributes = {}, ...children) => made(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => made(document.createElementNS(SVG, tag), attributes, children);

// Makes `old` equal to `wanted` with as few changes as possible: focus, selection and scroll
// positions survive a report. Children with an id are matched by it, others by their place.
function become(old, wanted) {
  for (const name of old.getAttributeNames()) {
    if (name !== "open" && !wanted.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const name of wanted.getAttributeNames()) {
    if (old.getAttribute(name) !== wanted.getAttribute(name)) old.setAttribute(name, wanted.getAttribute(name));
  }
  fill(old, [...wanted.childNodes]);
}
function fill(parent, children) {
  let at = parent.firstChild;
  for (const child of children) {
    let same = at;
    if (child.id) same = [...parent.children].find((one) => one.id === child.id);
    else if (at && (at.id || at.nodeName !== child.nodeName)) same = null;
    if (!same) {
      parent.insertBefore(child, at);
      continue;
    }
    if (same === at) at = at.nextSibling;
    else parent.insertBefore(same, at);
    if (same.nodeType !== Node.TEXT_NODE) become(same, child);
    else if (same.data !== child.data) same.data = child.data;
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}
function say(node, text, wrong = false) {
  if (node.textContent !== text) node.textContent = text;
  node.classList.toggle("wrong", wrong);
}

// --- figures --------------------------------------------------------------------------------------

const known = (value) => value !== null && value !== undefined;
const number = (value, digits = 3) =>
  known(value) ? value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1000 ? 21 : digits, maximumFractionDigits: 3 }) : "–";
const nats = (value) => number(known(value) ? 1000 * value : null);
const words = (text) => text.replaceAll("_", " ");
const percent = (part) => `${number(100 * part)} %`;
const megabytes = (bytes) => number(Math.round(bytes / 1e5) / 10);
const rate = (value) => (known(value) ? number(value >= 100 ? Math.round(value) : value) : "–");
// 1 ms is the bound of the histograms' first bucket: less cannot be told apart.
const latency = (s) => (!known(s) ? "–" : s <= 0.001 ? "≤ 1 ms" : s < 1 ? `${number(1000 * s)} ms` : `${number(s)} s`);
function duration(s) {
  for (const [size, unit] of [[86400, "days"], [3600, "hours"], [60, "minutes"]]) {
    if (s >= 2 * size) return `${Math.round(s / size)} ${unit}`;
  }
  return `${Math.round(s)} s`;
}
const range = (pair) => (pair && known(pair[0]) ? `${nats(pair[0])} to ${nats(pair[1])}` : null);

// --- the report -----------------------------------------------------------------------------------

let report = null;

function show(found) {
  report = found;
  const look = found.problems.length > 0 || !found.ready || found.draining;
  byId("summary").className = look ? "card look" : "card ready";
  say(byId("mark"), look ? "!" : "✓");
  say(byId("title"), found.title);
  document.title = `${look ? "! " : ""}${found.title} – Octet`;
  const lines = [["Requests", `${number(found.requests)} running; up for ${duration(found.uptime_s)}`], ...found.problems];
  const shared = found.shared_limits;
  if (shared && shared.state === "shared") lines.push(["Shared limits", `counted by Redis for ${number(shared.gateways)} gateways`]);
  for (const [name, { capture }] of Object.entries(found.models)) {
    if (capture) lines.push([`Capture of ${name}`, captureOf(capture)]);
  }
  fill(byId("problems"), lines.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
  fill(byId("intervals"), intervals(found.pools));
  fill(byId("pools"), Object.entries(found.pools).map(([name, pool]) => poolOf(name, pool)));
  offer(found);
  administer();
}

// What is kept of a model's requests for the next calibration: figures only, no text of a request.
function captureOf(capture) {
  const dropped = Object.entries(capture.dropped).filter(([, count]) => count);
  const thinned = capture.share_now < capture.share ? ` (${percent(capture.share)} until the file was full)` : "";
  const on = `on, ${percent(capture.share_now)} of requests${thinned}`;
  const facts = [capture.paused ? "paused by a failure" : on, `${number(capture.kept)} kept`];
  if (dropped.length) facts.push(`not kept: ${dropped.map(([outcome, count]) => `${number(count)} ${words(outcome)}`).join(", ")}`);
  facts.push(`${megabytes(capture.size_bytes)} of ${megabytes(capture.limit_bytes)} MB${capture.file ? ` in ${capture.file}` : ""}`);
  if (known(capture.last_failure_s_ago)) facts.push(`last failure ${duration(capture.last_failure_s_ago)} ago${capture.last_failure ? `: ${capture.last_failure}` : ""}`);
  return facts.join("; ");
}

// The expected range and the measured interval of each backend, on one logarithmic axis.
function intervals(pools) {
  const rows = Object.entries(pools).flatMap(([pool, { backends }]) =>
    backends.filter((one) => known(one.proof.kl)).map((one) => ({ pool, ...one })));
  if (!rows.length) return [h("p", { class: "lead" }, "No backend has been measured: no proof is required, or none has ended yet.")];
  const values = rows.flatMap(({ proof }) => [proof.kl, ...(proof.kl_interval || []), ...(proof.expected_kl || [])]);
  const positive = values.filter((value) => value > 0);
  const steps = [...Array(14).keys()].flatMap((i) => [1, 2, 5].map((step) => Number(`${step}e${i - 11}`)));
  const low = steps.filter((tick) => tick < Math.min(...positive, 1)).pop() || steps[0];
  const high = steps.find((tick) => tick > Math.max(...positive, low));
  let ticks = steps.filter((tick) => tick >= low && tick <= high);
  if (ticks.length > 6) ticks = ticks.filter((tick) => tick.toExponential().startsWith("1e"));
  const share = (value) => Math.min(Math.max(Math.log(Math.max(value, 1e-12) / low) / Math.log(high / low), 0), 1);
  const x = (value) => `${(4 + 92 * share(value)).toFixed(2)}%`;
  const wide = (from, to) => `${Math.max(92 * (share(to) - share(from)), 0.4).toFixed(2)}%`;
  const row = (one) => {
    const { kl, kl_interval: measured, expected_kl: expected } = one.proof;
    const [from, to] = range(measured) ? measured : [kl, kl];
    const outside = expected && (kl < expected[0] || kl > expected[1]);
    return h("div", { class: outside ? "interval outside" : "interval", id: idOf("interval", one) },
      h("span", { class: "name" }, `${one.pool} / ${one.name}`),
      svg("svg", { "aria-hidden": "true" },
        ticks.map((tick) => svg("line", { class: "tick", x1: x(tick), x2: x(tick), y1: 0, y2: "100%" })),
        expected ? svg("rect", { class: "expected", x: x(expected[0]), width: wide(...expected), y: 7, height: 20 }) : null,
        svg("line", { class: "measured", x1: x(from), x2: x(to), y1: 17, y2: 17 }),
        svg("circle", { class: "measured", cx: x(kl), cy: 17, r: 5 })),
      h("span", { class: "values" }, `${nats(kl)}${range(measured) ? ` (${range(measured)})` : ""}`,
        h("span", {}, expected ? ` expected ${range(expected)}` : " nothing was simulated: judged by a bound")));
  };
  const axis = svg("svg", { class: "axis", "aria-hidden": "true" }, ticks.map((tick) => svg("text", { x: x(tick), y: 14 }, nats(tick))));
  return [...rows.map(row), h("div", { class: "interval ticks", id: "axis" }, h("span"), axis, h("span"))];
}
const idOf = (kind, { pool, name }) => encodeURIComponent(`${kind}/${pool}/${name}`);

function poolOf(name, pool) {
  const { recent, queue } = pool;
  const facts = [`routed by ${words(pool.policy)}`, `${number(pool.active)} active`];
  if (queue) facts.push(`${number(queue.queued_requests)} queued`);
  if (pool.capacity_tokens) facts.push(`caches of ${number(pool.capacity_tokens)} tokens`);
  if (pool.phase !== "started") facts.push(words(pool.phase));
  const heading = encodeURIComponent(`pool/${name}`);
  const all = [...pool.backends, ...pool.retiring].map((one) => ({ pool: name, ...one }));
  return h("section", { id: `${heading}/`, "aria-labelledby": heading },
    h("div", { class: "title" }, h("h2", { id: heading }, `Pool ${name}`),
      h("span", { class: "badge" }, pool.precision || "no precision named"),
      h("span", { class: pool.ready ? "badge good" : "badge bad" }, pool.ready ? "✓ serves" : "! does not serve")),
    h("p", { class: "help" }, facts.join("; ")),
    h("div", { class: "recent" }, throughput(recent), latencies(recent.latencies, name)),
    h("div", { class: "backends" }, all.map(backendOf)));
}

function throughput({ tokens_per_s: now, output_tokens_per_s: course, every_s: every }) {
  const most = Math.max(...course, 1);
  const points = course.map((value, i) => `${i + 60 - course.length},${(38 - 36 * (value / most)).toFixed(1)}`);
  const label = course.length
    ? `Output tokens/s over the last ${duration(course.length * every)}: at most ${rate(most)}` : "No reading yet";
  return h("div", {},
    h("p", { class: "figure" }, rate(now && now.output), h("span", {}, " output tokens/s")),
    h("p", { class: "help" }, `and ${rate(now && now.input)} input tokens/s, over the last minute; the curve is the output over ${duration(60 * every)}`),
    svg("svg", { class: "course", viewBox: "0 0 59 40", preserveAspectRatio: "none", role: "img", "aria-label": label },
      points.length > 1 ? svg("polygon", { points: `${60 - points.length},40 ${points.join(" ")} 59,40` }) : null,
      points.length > 1 ? svg("polyline", { points: points.join(" ") }) : null));
}

const LATENCIES = {
  first_token_s: "to the first token", per_token_s: "a token after it", request_s: "whole request", queue_s: "wait in the queue",
};
function latencies(found, pool) {
  const names = ["p50", "p90", "p99"];
  return h("table", { "aria-label": `Latencies of pool ${pool} over the last five minutes` },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "latency, 5 minutes"), names.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, Object.entries(LATENCIES).map(([key, text]) => h("tr", {},
      h("th", { scope: "row" }, text), names.map((name) => h("td", {}, latency(found[key][name])))))));
}

function backendOf(one) {
  const { proof, load } = one;
  const facts = [["Proof", (proof.state === "none" ? "none required" : words(proof.state)) + (proof.probing ? ", being proven" : "")]];
  if (known(proof.kl)) facts.push(["KL, 10⁻³ nats", `${nats(proof.kl)}${range(proof.kl_interval) ? ` (${range(proof.kl_interval)})` : ""}`]);
  if (range(proof.expected_kl)) facts.push(["Expected", range(proof.expected_kl)]);
  facts.push(["Cache format", known(proof.kv_cache) ? proof.kv_cache.toUpperCase().replace("FLOAT16", "16 bits") : "not known"]);
  facts.push(["Requests", load ? `${number(load.running)} running, ${number(load.waiting)} waiting` : `${number(one.in_flight)} in flight`]);
  facts.push(["Cache use", load && known(load.kv_usage) ? used(load.kv_usage) : "not reported"]);
  facts.push(["Tokens/s", one.tokens_per_s ? `${rate(one.tokens_per_s.output)} out, ${rate(one.tokens_per_s.input)} in` : "–"]);
  facts.push(["Answered", known(one.last_success_s_ago) ? `${duration(one.last_success_s_ago)} ago` : "never"]);
  if (one.breaker !== "closed") facts.push(["Breaker", words(one.breaker)]);
  if (one.address) facts.push(["Address", one.address]);
  if (one.last_error) facts.push(["Last error", `${duration(one.last_error_s_ago)} ago: ${one.last_error}`]);
  const heading = idOf("backend", one);
  return h("article", { class: "backend", id: `${heading}/`, "aria-labelledby": heading },
    h("div", { class: "title" }, h("h3", { id: heading }, one.name),
      h("span", { class: one.up ? "badge good" : "badge bad" }, one.up ? "✓ " : "! ", one.standing === "in" ? "serves" : words(one.standing))),
    h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    proof.reason && proof.state !== "proven" && !(one.last_error || "").includes(proof.reason)
      ? h("p", { class: "help" }, proof.reason) : null,
    past(one), h("p", { class: "buttons" }, actions(one)));
}

const used = (part) => [`${Math.round(100 * part)} %`,
  svg("svg", { class: "used", "aria-hidden": "true" }, svg("rect", { width: `${Math.round(100 * part)}%`, height: "100%" }))];

function past({ pool, name, proof }) {
  if (!proof.history || !proof.history.length) return null;
  const cells = ({ at, outcome, kl, kl_interval: interval }) => h("tr", {},
    h("td", {}, h("time", { datetime: at }, new Date(at).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" }))),
    h("td", { class: "text" }, words(outcome)),
    h("td", {}, nats(kl), range(interval) ? h("span", {}, ` ${range(interval)}`) : null));
  return h("details", {}, h("summary", {}, `Proof history: ${number(proof.history.length)}`),
    h("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": `Proofs of ${pool} / ${name}` }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "when"), h("th", { scope: "col", class: "text" }, "outcome"), h("th", { scope: "col" }, "KL"))),
      h("tbody", {}, [...proof.history].reverse().map(cells)))));
}

function actions(one) {
  if (!unlocked() || one.standing === "leaving") return [];
  const button = (action, text) => h("button", { type: "button", "data-action": action, "data-pool": one.pool, "data-name": one.name,
    "aria-label": `${text} ${one.pool} / ${one.name}` }, text);
  return [one.proof.state === "none" ? null : button("prove", "Prove again"), button("drain", "Drain")];
}

// --- the stream of reports ------------------------------------------------------------------------

// Yields the data of each server-sent event.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status}`;
  }
}
const authorization = (key) => (key ? { authorization: `Bearer ${key}` } : {});
const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

const AGAIN = "again"; // connects anew at once: with another key, or when the page is shown again
let stream = new AbortController();
async function follow() {
  for (let tries = 0; ;) {
    if (document.hidden) await new Promise((resolve) => { document.addEventListener("visibilitychange", resolve, { once: true }); });
    stream = new AbortController();
    const mine = stream;
    let timer = setTimeout(() => mine.abort(SILENT), SILENT_MS);
    let why = "the gateway closed the connection";
    try {
      const response = await fetch("ui/events", { headers: authorization(adminKey), signal: mine.signal, cache: "no-store" });
      if (!response.ok) throw new Error(await messageOf(response));
      for await (const data of events(response.body)) {
        clearTimeout(timer);
        timer = setTimeout(() => mine.abort(SILENT), SILENT_MS);
        tries = 0;
        show(JSON.parse(data));
        connected(report.version === document.body.dataset.version ? "live" : `live; load the page again: the gateway is now ${report.version}`);
      }
    } catch (error) {
      why = error === SILENT ? SILENT : error instanceof TypeError ? "the gateway cannot be reached" : error.message;
    }
    clearTimeout(timer);
    if (mine.signal.reason === AGAIN || document.hidden) continue;
    connected(`not connected: ${why}; trying again`, true);
    await pause(Math.min(1000 * 2 ** tries++, LONGEST_WAIT_MS));
  }
}
function connected(text, stale = false) {
  say(byId("connection"), text);
  document.body.classList.toggle("stale", stale);
}
const again = () => stream.abort(AGAIN);
document.addEventListener("visibilitychange", () => { if (document.hidden) again(); });

// --- administration -------------------------------------------------------------------------------

let adminKey = ""; // kept nowhere else: closing the page forgets it
const unlocked = () => report && report.administration !== "off" && report.administrator;

function administer() {
  const { administration: kind } = report;
  const texts = {
    off: "Administration is off. To drain and prove backends here, set admin.sha256 in the configuration, or give it an address of its own by admin.port.",
    key: unlocked() ? "Unlocked: the backends above have buttons to prove them again and to drain them."
      : "The administrator's key shows addresses and errors, and the buttons to drain backends and prove them again. The page forgets it when it is closed.",
    open: unlocked() ? "This address needs no key: the backends above have buttons to prove them again and to drain them."
      : "Open this page by an IP address, localhost, a name without dots, or admin.host.",
  };
  say(byId("rights"), texts[kind]);
  byId("unlock").hidden = kind !== "key" || unlocked();
  byId("reload").hidden = !unlocked();
  byId("lock").hidden = kind !== "key" || !unlocked();
}

async function request(method, path) {
  try {
    const response = await fetch(path, { method, headers: authorization(adminKey) });
    if (response.ok) return { found: await response.json() };
    return { problem: response.status === 401 ? "That is not the administrator's key." : await messageOf(response) };
  } catch {
    return { problem: "the gateway cannot be reached" };
  }
}
// A name may contain slashes. As %2F they stay part of it: `/../` would otherwise lead elsewhere.
const pathOf = ({ pool, name }) => `admin/pools/${encodeURIComponent(pool)}/backends/${encodeURIComponent(name)}`;
const done = (text, wrong) => say(byId("done"), text, wrong);

async function prove(one) {
  const { problem } = await request("POST", `${pathOf(one)}/proof`);
  done(problem || `${one.pool} / ${one.name} is being proven; the result is in its history.`, Boolean(problem));
}
async function drain(one) {
  const { found, problem } = await request("DELETE", pathOf(one));
  done(problem || `${one.name} gets no more requests; ${number(found.finishing)} finish.`, Boolean(problem));
}
async function reload() {
  const { found, problem } = await request("POST", "admin/reload");
  done(problem || `The configuration is in use: ${found.backends_added} backends added, ${found.backends_removed} removed, ${found.backends_kept} kept.`, Boolean(problem));
}
async function unlock(event) {
  event.preventDefault();
  adminKey = byId("admin-key").value;
  const { problem } = await request("GET", "admin/backends");
  if (problem) adminKey = "";
  else byId("admin-key").value = "";
  done(problem || "Unlocked.", Boolean(problem));
  again();
}
function lock() {
  adminKey = "";
  done("Locked.");
  again();
}

let chosen = null; // the backend that the open dialog is about
function confirmDrain(one) {
  chosen = one;
  say(byId("confirm-title"), `Drain ${one.pool} / ${one.name}?`);
  const others = report.pools[one.pool] && report.pools[one.pool].backends.some((other) => other.up && other.name !== one.name);
  say(byId("confirm-text"), "It gets no more requests, and leaves the pool when its running ones have ended. Reloading the configuration brings it back, if the file has it."
    + (others ? "" : " No other backend of this pool serves."), !others);
  byId("confirm").showModal();
}

// --- the playground -------------------------------------------------------------------------------

let running = null;

function options(select, names) {
  const now = [...select.options].map((option) => option.value);
  if (now.join("\n") === names.map(([value]) => value).join("\n")) return;
  const before = select.value;
  select.replaceChildren(...names.map(([value, text]) => h("option", { value }, text)));
  if (names.some(([value]) => value === before)) select.value = before;
}
function offer(found) {
  const models = Object.entries(found.models);
  options(byId("model"), models.flatMap(([name, model]) => [name, ...model.aliases, ...Object.keys(model.tier_aliases)]).map((name) => [name, name]));
  offerTiers();
  byId("key-field").hidden = !found.keys;
}
function offerTiers() {
  const name = byId("model").value;
  const model = report && (report.models[name] || Object.values(report.models).find((one) => one.aliases.includes(name)));
  const tiers = model ? Object.keys(model.tiers) : [];
  options(byId("tier"), [["", "the model's own"], ...tiers.map((tier) => [tier, tier])]);
  byId("tier-field").hidden = !tiers.length;
}

async function ask(event) {
  event.preventDefault();
  if (running) return;
  const mine = running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  byId("answer").hidden = true;
  say(byId("outcome"), "Waiting for the first token");
  try {
    say(byId("outcome"), await complete(mine.signal));
  } catch (error) {
    const text = mine.signal.aborted ? "Stopped." : error instanceof TypeError ? "the gateway cannot be reached" : error.message;
    say(byId("outcome"), text, !mine.signal.aborted);
  }
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

// Streams one completion into the page, and returns how it ended.
async function complete(signal) {
  const scored = byId("confidence").checked, tier = byId("tier").value, began = performance.now();
  const body = {
    model: byId("model").value, prompt: byId("prompt").value, max_tokens: byId("tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber, stream: true, ...(scored ? { logprobs: 1 } : {}),
  };
  const headers = { "content-type": "application/json", ...(tier ? { "x-octet-tier": tier } : {}), ...(report.keys ? authorization(byId("key").value) : {}) };
  const response = await fetch("v1/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error(await messageOf(response));
  begin(response.headers, scored);
  let tokens = 0, first = 0, reason = "", ended = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    const found = JSON.parse(data);
    if (found.error) throw new Error(found.error.message);
    const choice = found.choices && found.choices[0];
    if (!choice) continue;
    reason = choice.finish_reason || reason;
    const added = write(choice);
    if (added && !tokens) first = performance.now();
    tokens += added;
  }
  if (!ended) throw new Error("the answer broke off");
  const seconds = (performance.now() - first) / 1000;
  const speed = tokens >= 10 && seconds > 0 ? `, ${rate((tokens - 1) / seconds)} tokens/s` : "";
  return `Ended (${reason || "no reason given"}): ${number(tokens)} tokens, the first after ${latency((first - began) / 1000)}${speed}.`;
}
function begin(headers, scored) {
  const facts = [
    ["Backend", headers.get("x-octet-backend")], ["Precision", headers.get("x-octet-precision") || "not named"], ["Tier", headers.get("x-octet-tier")],
    ["Divergence, at most", headers.has("x-octet-divergence") ? `${nats(Number(headers.get("x-octet-divergence")))} × 10⁻³ nats` : "not measured"],
    ["Artifact", headers.get("x-octet-artifact")], ["Fallback", headers.get("x-octet-fallback")], ["Request", headers.get("x-request-id")],
  ].filter(([, value]) => value);
  byId("facts").replaceChildren(...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  byId("text").replaceChildren();
  byId("rows").replaceChildren();
  byId("scale").hidden = byId("each").hidden = !scored;
  byId("answer").hidden = false;
}
// Adds the tokens of one event, and returns how many they are.
function write({ text, logprobs }) {
  const names = (logprobs && logprobs.tokens) || [], logs = (logprobs && logprobs.token_logprobs) || [];
  // Tokens of parts of a character have no text of their own: then the event is marked as a whole.
  const pieces = names.join("") === text ? names.map((name, i) => [name, logs[i]]) : [[text, Math.min(...logs.filter(known), 0)]];
  for (const [token, log] of pieces) {
    const piece = visible(token || "");
    if (piece) byId("text").append(names.length ? h("mark", { class: level(log), title: `${chance(log)}` }, piece) : piece);
  }
  names.forEach((name, i) => byId("rows").append(h("tr", {},
    h("td", { class: "token" }, visible(name).replaceAll(" ", "␣").replaceAll("\n", "↵")), h("td", {}, chance(logs[i])), h("td", {}, known(logs[i]) ? logs[i].toFixed(3) : "–"))));
  return names.length || (text ? 1 : 0);
}
// Control characters draw nothing, and direction marks reorder the text around them.
const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
  .replace(/[\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
const level = (log) => (!known(log) ? "p0" : ["p0", "p1", "p2", "p3"][[0.5, 0.1, 0.01].filter((limit) => Math.exp(log) < limit).length]);
const chance = (log) => (!known(log) ? "–" : Math.exp(log) < 1e-5 ? "below 0.001 %" : `${number(100 * Math.exp(log))} %`);

// --- listeners ------------------------------------------------------------------------------------

byId("pools").addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (button) ({ prove, drain: confirmDrain })[button.dataset.action]({ pool: button.dataset.pool, name: button.dataset.name });
});
byId("confirm-no").addEventListener("click", () => byId("confirm").close());
byId("confirm-yes").addEventListener("click", () => {
  byId("confirm").close();
  drain(chosen);
});
byId("unlock").addEventListener("submit", unlock);
byId("lock").addEventListener("click", lock);
byId("reload").addEventListener("click", reload);
byId("ask").addEventListener("submit", ask);
byId("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit(); });
byId("stop").addEventListener("click", () => { if (running) running.abort(); });
byId("model").addEventListener("change", offerTiers);
follow();
