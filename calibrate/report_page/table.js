// Every tensor and weight in one table: sorted by a click, filtered by words.
const PAGE = 300; // rows at once; thousands of experts would slow the page down
const unitOf = new Map();
for (const unit of report.sensitivity ? report.sensitivity.units : [])
  for (const linear of unit.linears) unitOf.set(linear, unit);

const rows = [
  ...Object.entries(report.tensors).map(([name, tensor]) => ({
    name, kind: tensor.kind, format: tensor.format, treatment: tensor.treatment, absmax: tensor.absmax,
    scale: tensor.chosen ? tensor.chosen.scale : tensor.global_scale, sqnr: tensor.sqnr_db,
    small: tensor.chosen ? tensor.small_sqnr_db : tensor.measured_small_sqnr_db,
    saturated: tensor.chosen ? tensor.chosen.saturated : null,
    underflow: tensor.chosen ? tensor.chosen.underflow
      : tensor.format === "e4m3" ? tensor.underflow_at_most : null, bound: !tensor.chosen,
    kl: tensor.kind === "input" ? (unitOf.get(tensor.consumers[0]) || {}).kl : undefined,
  })),
  ...Object.entries(report.weights).map(([name, weight]) => ({
    name: `${name}.weight`, kind: "weight", format: weight.format, sqnr: weight.sqnr_db,
    treatment: weight.scales.length ? `${weight.scales.join(" × ")} scales` : "one scale",
  })),
];
const COLUMNS = [
  ["name", "tensor", null], ["kind", "kind", null], ["format", "format", null],
  ["sqnr", "SQNR dB", (row) => decibels(row.sqnr)], ["small", "small 90 % dB", (row) => decibels(row.small)],
  ["saturated", "clipped", (row) => percent(row.saturated)],
  ["underflow", "to zero", (row) => (row.bound && row.underflow ? "≤ " : "") + percent(row.underflow)],
  ["scale", "scale", (row) => digits(row.scale)], ["absmax", "largest", (row) => digits(row.absmax)],
  ...(report.sensitivity ? [["kl", "KL of its unit", (row) => digits(row.kl)]] : []),
  ["treatment", "as served", null],
];
let sorted = { key: "sqnr", up: true }, limit = PAGE;

function compare(a, b) {
  const [x, y] = [a[sorted.key], b[sorted.key]];
  const missing = (value) => value === null || value === undefined;
  if (missing(x) || missing(y)) return missing(x) - missing(y); // what is not known comes last
  const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
  return sorted.up ? order : -order;
}

function cell(row, [key, , format]) {
  const text = format ? format(row) : row[key];
  if (key !== "name" || !report.distributions.tensors[row.name])
    return element("td", { class: format ? false : "text" }, text);
  const show = () => { pick(row.name); byId("distribution").scrollIntoView(); };
  return element("td", { class: "text" },
    element("button", { type: "button", onclick: show, title: "Show its distribution" }, text));
}

function fillTable() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = rows.filter((row) => {
    const text = `${row.name} ${row.kind} ${row.format} ${row.treatment}`.toLowerCase();
    return words.every((word) => text.includes(word));
  }).sort(compare);
  const header = COLUMNS.map((column) => {
    const [key, title] = column, current = sorted.key === key;
    const direction = current ? (sorted.up ? "ascending" : "descending") : "none";
    const click = () => {
      sorted = { key, up: current ? !sorted.up : true };
      fillTable();
      byId("table").querySelector(`[data-key="${key}"]`).focus();
    };
    return element("th", { scope: "col", "aria-sort": direction, class: column[2] ? false : "text" },
      element("button", { type: "button", "data-key": key, onclick: click },
        title + (current ? (sorted.up ? " ▲" : " ▼") : "")));
  });
  byId("table").tHead.replaceChildren(element("tr", {}, ...header));
  byId("table").tBodies[0].replaceChildren(...found.slice(0, limit).map((row) =>
    element("tr", {}, ...COLUMNS.map((column) => cell(row, column)))));
  byId("shown").textContent = `${found.length} of ${rows.length}`;
  byId("more").hidden = found.length <= limit;
  byId("more").textContent = `Show all ${found.length}`;
}

function startTable() {
  byId("filter").addEventListener("input", () => { limit = PAGE; fillTable(); });
  byId("more").addEventListener("click", () => { limit = Infinity; fillTable(); });
  fillTable();
}
