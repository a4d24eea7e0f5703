// One tensor's distribution on a log2 axis, with the format's grid under the scale in use.
const plotted = Object.keys(report.distributions.tensors);
const step = 1 / report.distributions.bins_per_octave;

// The scale that places the grid: the stored one, or that of a token or group with the largest value.
function gridOf(tensor) {
  const format = report.formats[tensor.format];
  const quality = tensor.chosen || tensor.methods.max;
  if (!format || !quality || !(quality.scale > 0)) return null;
  const top = format.grid[format.grid.length - 1], last = format.grid[format.grid.length - 2];
  return {
    format, scale: quality.scale, stored: Boolean(tensor.chosen),
    saturates: quality.scale * format.max, clips: quality.scale * (top + (top - last) / 2),
    normal: quality.scale * format.smallest_normal,
    zero: (quality.scale * format.smallest_subnormal) / 2,
  };
}

const power = (value) => "2" + superscript(Math.round(value));

// Whether what becomes of a value depends on the others of its group, which no histogram tells.
const perGroup = (tensor) => tensor.dynamic && tensor.granularity === "group";

// Below this, a value is zero under the smallest group scale that E4M3 has; 0 if there is no such.
function certainZero(tensor, grid) {
  if (!tensor.global_scale) return 0;
  return (tensor.global_scale * 2 ** -9 * grid.format.smallest_subnormal) / 2;
}

function distributionPlot(name, logarithmic) {
  const tensor = report.tensors[name], shown = report.distributions.tensors[name];
  const grid = gridOf(tensor), grouped = grid && perGroup(tensor);
  const where = grid && tensor.dynamic && !grouped ? " (in a token with the largest value)" : "";
  const kinds = [
    ["normal", grouped ? "depends on the largest value of its group" : "full precision of the format", "bar", ""],
    ["low", "subnormal: less precision" + where, "bar-low", ""],
    ["zero", (grouped ? "becomes zero in any group" : "becomes zero") + where, "bar-zero", "/"],
    ["clip", "clipped", "bar-clip", "x"],
  ];
  const bins = { normal: [], low: [], zero: [], clip: [] };
  const zero = grouped ? certainZero(tensor, grid) : grid && grid.zero;
  shown.counts.forEach((count, index) => {
    if (!count) return;
    const at = (shown.first + index + 0.5) * step, value = 2 ** at;
    let kind = "normal";
    if (grid && value < zero) kind = "zero";
    else if (grid && !grouped && value < grid.normal) kind = "low";
    else if (grid && value > grid.clips) kind = "clip";
    bins[kind].push([at, count / tensor.elements, count]);
  });
  const traces = kinds.filter(([kind]) => bins[kind].length).map(([kind, label, fill, pattern]) => ({
    type: "bar", name: grid ? label : "share", x: bins[kind].map((bin) => bin[0]),
    y: bins[kind].map((bin) => bin[1]), width: step, showlegend: Boolean(grid),
    customdata: bins[kind].map((bin) => [digits(2 ** bin[0]), bin[2].toLocaleString("en")]),
    hovertemplate: "|x| ≈ %{customdata[0]}<br>%{customdata[1]} elements (%{y:.2~%})<extra></extra>",
    marker: { color: color(fill), pattern: { shape: pattern, size: 5, solidity: 0.35 }, line: { width: 0 } },
  }));
  const first = shown.first * step, last = (shown.first + shown.counts.length) * step;
  let low = Math.floor(first), high = Math.ceil(last + 0.5);
  const shapes = [], annotations = [];
  const line = (value, text, dash, tint, height) => {
    const at = Math.log2(value);
    if (!Number.isFinite(at)) return;
    low = Math.min(low, Math.floor(at - 0.5));
    high = Math.max(high, Math.ceil(at + 0.5));
    shapes.push({ type: "line", x0: at, x1: at, y0: 0.1, y1: height, yref: "paper",
      line: { color: color(tint), width: 2, dash } });
    annotations.push({ x: at, y: height, yref: "paper", text, showarrow: false, yanchor: "bottom",
      xanchor: at > (low + high) / 2 ? "right" : "left", font: { color: color(`text-${tint}`), size: 12 },
      bgcolor: color("card") });
  };
  if (grid) {
    const clipping = tensor.absmax > grid.clips;
    if (grouped) {
      line(tensor.absmax, `largest ${digits(tensor.absmax)}`, "solid", "c1", 0.94);
      if (zero) line(zero, `zero in any group below ${digits(zero)}`, "dash", "c4", 0.8);
    } else {
      line(grid.zero, `underflow below ${digits(grid.zero)}`, "dash", "c4", 0.8);
      line(grid.normal, `smallest normal ${digits(grid.normal)}`, "dot", "c5", 0.87);
      line(grid.saturates, `saturates at ${digits(grid.saturates)}`, "solid", "c1", 0.94);
      if (clipping) line(tensor.absmax, `largest ${digits(tensor.absmax)}`, "dot", "c5", 0.73);
    }
    const values = grid.format.grid.filter((value) => value > 0).map((value) => value * grid.scale);
    traces.push({
      type: "scatter", mode: "markers", x: values.map(Math.log2), y: values.map(() => 0), yaxis: "y2",
      name: `values of ${tensor.format}` + (grouped ? " in the group of the largest value" : ""), customdata: values.map((value) => digits(value, 4)),
      hovertemplate: "a value of the format: %{customdata}<extra></extra>",
      marker: { symbol: "line-ns-open", size: 12, color: color("text"), line: { width: 1 } },
    });
  }
  const fit = byId("plot-distribution").clientWidth < 480 ? 6 : 12; // labels side by side
  const space = Math.max(1, Math.ceil((high - low) / fit)), ticks = [];
  for (let at = Math.ceil(low / space) * space; at <= high; at += space) ticks.push(at);
  const powers = [...Array(12).keys()].map((at) => 10 ** -at);
  const lines = grid && !grouped ? `; underflow below ${digits(grid.zero)}, saturation at ${digits(grid.saturates)}` : "";
  return {
    traces, label: `Distribution of the magnitudes of ${name}, largest ${digits(tensor.absmax)}${lines}`,
    layout: {
      barmode: "overlay", bargap: 0, shapes, annotations, margin: { l: 10, r: 14, t: 8, b: 10 },
      xaxis: { title: "magnitude |x|", range: [low, high], tickvals: ticks, ticktext: ticks.map(power),
        zeroline: false, anchor: grid ? "y2" : "y" },
      yaxis: { title: "share of elements", type: logarithmic ? "log" : "linear", domain: [0.1, 1],
        ...(logarithmic ? { tickvals: powers, ticktext: powers.map((at) => percent(at)) } : { tickformat: ".1~%" }),
        // Room above, for what the lines are called.
        range: logarithmic ? logRange(bins) : [0, 1.35 * Math.max(0, ...shares(bins))] },
      yaxis2: { domain: [0, 0.07], visible: false, range: [-1, 1], fixedrange: true },
    },
  };
}

const shares = (bins) => Object.values(bins).flat().map((bin) => bin[1]);

function logRange(bins) {
  const found = shares(bins);
  if (!found.length) return [-6, 0];
  const low = Math.floor(Math.log10(Math.min(...found)) - 0.2), high = Math.log10(Math.max(...found));
  return [low, high + (high - low) * 0.4];
}

function distributionFacts(name) {
  const tensor = report.tensors[name], quality = tensor.chosen;
  const facts = [["as served", tensor.treatment], ["elements", tensor.elements.toLocaleString("en")],
    ["largest magnitude", digits(tensor.absmax)], ["99.9 % are below", digits(tensor.quantiles["0.999"])],
    ["half are below", digits(tensor.quantiles["0.5"])], ["exactly zero", percent(tensor.zeros)]];
  if (quality) {
    facts.push(["scale", digits(quality.scale, 6)], ["clipped", percent(quality.saturated)],
      ["becomes zero", percent(quality.underflow)]);
  } else if (tensor.underflow_at_most !== null && tensor.format === "e4m3") {
    facts.push(["becomes zero, at most", percent(tensor.underflow_at_most)]);
  }
  if (tensor.global_scale) facts.push(["global scale", digits(tensor.global_scale, 6)]);
  if (tensor.methods.max) {
    facts.push(["SQNR", tensor.sqnr_db === null ? "not known" : `${decibels(tensor.sqnr_db)} dB`]);
    if (quality) facts.push(["SQNR of the smallest 90 %", `${decibels(tensor.small_sqnr_db)} dB`]);
    else if (tensor.measured_small_sqnr_db !== null)
      facts.push(["SQNR of the smallest 90 %", `${decibels(tensor.measured_small_sqnr_db)} dB`]);
  }
  const list = element("dl", {}, ...facts.map(([term, value]) =>
    element("div", {}, element("dt", {}, term), element("dd", {}, value))));
  const methods = Object.entries(tensor.methods);
  const why = quality || !methods.length ? null : element("p", { class: "help" }, perGroup(tensor)
    ? "Its scales are made at run time for each group, so where a value falls on the format's grid depends on its group."
    : "Its scales are made at run time, so the plot shows the range of a token that holds the largest value; others" +
      " have smaller scales and lose less.");
  // One scale for the whole tensor says nothing of FP4 in groups: it would lose nearly everything.
  if (!methods.length || (tensor.dynamic && tensor.format !== "e4m3")) return [list, why].filter(Boolean);
  const head = ["one static scale by", "scale", "SQNR dB", "clipped", "becomes zero"];
  const table = element("table", { class: "small-table" },
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...methods.map(([method, found]) => element("tr", {},
      element("td", {}, method), element("td", {}, digits(found.scale)),
      element("td", {}, found.sqnr_db === null ? "∞" : found.sqnr_db.toFixed(2)),
      element("td", {}, percent(found.saturated)), element("td", {}, percent(found.underflow))))));
  return [list, why, element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, table)].filter((item) => item !== null);
}

let picked = null;

function pick(name) {
  if (!report.distributions.tensors[name]) {
    byId("pick-error").textContent = report.tensors[name]
      ? "its distribution is in histograms.safetensors only" : "no tensor of that name";
    return;
  }
  byId("pick-error").textContent = "";
  byId("pick").value = picked = name;
  plot("plot-distribution", () => distributionPlot(name, byId("logarithmic").checked));
  byId("distribution-facts").replaceChildren(...distributionFacts(name));
}

function startDistribution() {
  if (!plotted.length) return;
  byId("names").append(...plotted.map((name) => element("option", { value: name })));
  const box = byId("pick");
  box.addEventListener("change", () => pick(box.value.trim()));
  box.addEventListener("focus", () => box.select());
  const move = (by) => pick(plotted[(plotted.indexOf(picked) + by + plotted.length) % plotted.length]);
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));
  byId("logarithmic").addEventListener("change", () => redraw("plot-distribution"));
  const worst = report.summary.worst_tensor;
  pick(report.distributions.tensors[worst] ? worst : plotted[0]);
}
