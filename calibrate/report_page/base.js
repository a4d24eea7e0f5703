// The report's data, colours by theme, and how a plot is drawn and drawn again.
const report = JSON.parse(document.getElementById("report-data").textContent);
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// One colour, symbol and dash each, so that none has to be told by colour alone.
const STYLES = [
  ["c0", "circle", "solid"], ["c1", "square", "dash"], ["c2", "diamond", "dot"],
  ["c3", "triangle-up", "dashdot"], ["c4", "cross", "longdash"], ["c5", "x", "longdashdot"],
];
const GROUPS = {
  q: "q/k/v", k: "q/k/v", v: "q/k/v", gate: "gate/up", up: "gate/up", w1: "gate/up", w3: "gate/up",
  "w1/w3": "gate/up", w2: "down",
};
const ORDER = ["q/k/v", "o", "gate/up", "down", "expert gate/up", "expert down", "key", "value", "query"];

function groupOf(role) {
  const expert = role.startsWith("expert ");
  const short = expert ? role.slice(7) : role;
  return (expert ? "expert " : "") + (GROUPS[short] || short);
}

function styleOf(group) {
  if (group === "expert gate/up") return ["c2", "hexagon", "dot"];
  if (group === "expert down") return ["c3", "star", "dashdot"];
  const place = { query: 0, key: 4, value: 5 }[group] ?? Math.max(0, ORDER.indexOf(group));
  return STYLES[place % STYLES.length];
}

function digits(value, places = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-4 || size >= 1e7)) return scientific(value, places);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 10 ** places ? 7 : places });
}
const superscript = (exponent) => String(exponent).replace(/[-\d]/g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] || "⁻");
function scientific(value, places) {
  const [mantissa, exponent] = value.toExponential(places - 1).split("e");
  return `${mantissa}×10${superscript(Number(exponent))}`;
}
const decibels = (value) => (value === null || value === undefined ? "–" : value.toFixed(1));
const percent = (value) => {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const shown = value < 2e-6 ? scientific(value * 100, 2).replace(".0×", "×").replace(/^1×/, "") : digits(value * 100);
  return shown + " %";
};
const short = (name) => name.replace(/^model\./, "").replace("self_attn.", "attn.");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const drawn = new Map(); // element id to what makes { traces, layout, label }

let laidOut = false; // until every figure is in its grid, no plot has its width

function plot(id, make) {
  drawn.set(id, make);
  if (laidOut) redraw(id);
}

function drawAll() {
  laidOut = true;
  for (const id of drawn.keys()) redraw(id);
}

function redraw(id) {
  const { traces, layout = {}, label } = drawn.get(id)();
  const node = byId(id);
  const narrow = node.clientWidth < 480;
  const axis = {
    gridcolor: color("grid"), linecolor: color("line"), zerolinecolor: color("line"),
    automargin: true, title: { standoff: 8 },
  };
  const merged = {
    font: { family: "system-ui, sans-serif", size: narrow ? 12 : 13, color: color("text") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 10, r: 14, t: 14, b: 10 }, hovermode: "closest", dragmode: narrow ? false : "zoom",
    legend: { orientation: "h", yref: "container", yanchor: "bottom", y: 0, x: 0 },
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
    ...layout,
  };
  for (const name of ["xaxis", "yaxis", "yaxis2"]) {
    if (name === "yaxis2" && !layout.yaxis2) continue;
    merged[name] = { ...axis, ...(layout[name] || {}) };
    const title = (layout[name] || {}).title;
    if (title) merged[name].title = { text: title, standoff: 8 };
  }
  const config = { displaylogo: false, responsive: true, displayModeBar: false };
  Plotly.react(node, traces, merged, config);
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", label);
}

// A plot with a heading, in a grid; `make` as for plot().
function figure(grid, id, title, make, caption = "") {
  const holder = element("div", { id, class: "plot" });
  byId(grid).append(
    element("figure", {}, element("h3", {}, title), holder,
      caption ? element("figcaption", {}, caption) : null));
  plot(id, make);
}

function note(grid, title, text) {
  byId(grid).append(element("figure", {}, element("h3", {}, title), element("p", {}, text)));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light theme" : "Dark theme";
  byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
  if (laidOut) drawAll();
}
