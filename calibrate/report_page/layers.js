// What varies by layer: SQNR, saturation and underflow.

// Points [{ layer, group, value, name }] to one line a group; of several in a layer, the worst.
function lines(points, worst) {
  const groups = new Map();
  for (const point of points) {
    if (point.value === null || point.value === undefined || point.layer === null) continue;
    if (!groups.has(point.group)) groups.set(point.group, new Map());
    const layers = groups.get(point.group), before = layers.get(point.layer);
    if (!before || worst(point.value, before.value) === point.value) layers.set(point.layer, point);
  }
  const order = [...groups.keys()].sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  return order.map((group) => {
    const found = [...groups.get(group).values()].sort((a, b) => a.layer - b.layer);
    return { group, points: found };
  });
}

function traceOf({ group, points }, format, reference) {
  const [tint, symbol, dash] = styleOf(group);
  return {
    type: "scatter", mode: "lines+markers", name: group + (reference ? " (if static)" : ""),
    x: points.map((point) => point.layer), y: points.map((point) => point.value),
    customdata: points.map((point) => point.name),
    hovertemplate: `%{customdata}<br>%{y:${format}}<extra></extra>`,
    line: { color: color(tint), width: reference ? 1 : 2, dash: reference ? "dot" : dash },
    marker: { color: color(tint), symbol: reference ? symbol + "-open" : symbol, size: 8 },
  };
}

function layerAxis(points) {
  const last = Math.max(0, ...points.map((point) => point.layer));
  return { title: "layer", range: [-0.4, last + 0.4], zeroline: false,
    dtick: last < 12 ? 1 : null, tickformat: "d" };
}

function describe(title, found, unit) {
  const all = found.flatMap((line) => line.points);
  if (!all.length) return `${title}: nothing to show`;
  const low = all.reduce((a, b) => (b.value < a.value ? b : a));
  const high = all.reduce((a, b) => (b.value > a.value ? b : a));
  return `${title}: from ${digits(low.value)}${unit} (${low.name}) to ${digits(high.value)}${unit} (${high.name})`;
}

// Decibels need no zero, but a span of hundredths must not look like a cliff.
function decibelRange(points) {
  const values = points.map((point) => point.value);
  const low = Math.min(...values), high = Math.max(...values), middle = (low + high) / 2;
  const half = Math.max(2, (high - low) * 0.6);
  return [middle - half, middle + half];
}

function sqnrFigure(id, title, points, { reference = false, caption = "" } = {}) {
  const found = lines(points, Math.min);
  const all = found.flatMap((line) => line.points);
  if (!all.length) return false;
  figure("layers-grid", id, title, () => ({
    traces: found.map((line) => traceOf(line, ".2f", reference)),
    label: describe(title, found, " dB"),
    layout: { xaxis: layerAxis(all), yaxis: { title: "SQNR, dB", range: decibelRange(all) },
      showlegend: true },
  }), caption);
  return true;
}

function startLayers() {
  const tensors = Object.entries(report.tensors).map(([name, tensor]) => ({ name, ...tensor }));
  const of = (kinds, value) => tensors.filter((tensor) => kinds.includes(tensor.kind)).map((tensor) =>
    ({ layer: tensor.layer, group: groupOf(tensor.role), value: value(tensor), name: tensor.name }));
  const known = sqnrFigure("sqnr-inputs", "Inputs", of(["input"], (tensor) => tensor.sqnr_db),
    { caption: tensors.some((t) => t.dynamic && t.measured_sqnr_db !== null) ? "Measured on samples where scales are made at run time." : "" });
  if (!known) {
    // The whole tensor under one scale says something of E4M3, whose range covers it, not of FP4.
    const reference = (tensor) => (tensor.format === "e4m3" && tensor.methods.max ? tensor.methods.max.sqnr_db : null);
    const shown = sqnrFigure("sqnr-inputs", "Inputs (not known; one static scale for comparison)",
      of(["input"], reference), { reference: true,
        caption: "Served with scales made at run time, whose error a histogram cannot tell." });
    if (!shown) note("layers-grid", "Inputs", "Not known: their scales are made at run time for each group, and a histogram cannot tell which values share one. See what is not known.");
  }
  sqnrFigure("sqnr-small", "Inputs, the smallest 90 % of their values", of(["input"], (tensor) =>
    (tensor.chosen ? tensor.small_sqnr_db : tensor.measured_small_sqnr_db)),
    { caption: "Far below the SQNR of all, a few large values take the format's range." });
  if (!sqnrFigure("sqnr-cache", "Keys and values in the cache", of(["key", "value", "query"], (t) => t.sqnr_db)))
    note("layers-grid", "Keys and values in the cache", "Not quantized.");
  const weights = Object.entries(report.weights).map(([name, weight]) =>
    ({ layer: weight.layer, group: groupOf(weight.role), value: weight.sqnr_db, name }));
  sqnrFigure("sqnr-weights", "Weights", weights);
  const units = report.sensitivity ? report.sensitivity.units : [];
  const outputs = units.filter((unit) => unit.linears.length).map((unit) => {
    const linear = unit.linears[0], layer = /\.layers\.(\d+)\./.exec(linear);
    const role = (/\.experts\./.test(linear) ? "expert " : "") + linear.split(".").pop().replace(/_proj$/, "");
    return { layer: layer ? Number(layer[1]) : null, group: groupOf(role), value: unit.output_sqnr_db, name: unit.name };
  });
  sqnrFigure("sqnr-outputs", "Outputs of the linears (measured)", outputs);

  rangeFigure("range-underflow", "Becomes zero", tensors, (quality) => quality.underflow,
    "No element of any tensor with a stored scale becomes zero.");
  rangeFigure("range-saturated", "Clipped", tensors, (quality) => quality.saturated,
    "No element of any tensor with a stored scale is clipped.");
  if (tensors.some((tensor) => tensor.format === "e4m3" && tensor.underflow_at_most !== null))
    rangeFigure("range-bound", "Becomes zero at most, where scales are made at run time",
      tensors.filter((tensor) => tensor.format === "e4m3"), null, "");
}

function rangeFigure(id, title, tensors, of, nothing) {
  const value = of ? (tensor) => (tensor.chosen ? of(tensor.chosen) : null) : (tensor) => tensor.underflow_at_most;
  const points = tensors.map((tensor) => ({ layer: tensor.layer, group: groupOf(tensor.role),
    value: value(tensor), name: tensor.name }));
  const some = points.filter((point) => point.value > 0 && point.layer !== null);
  if (!some.length) {
    if (nothing) note("range-grid", title, points.some((p) => p.value !== null) ? nothing : "No tensor has a stored scale.");
    return;
  }
  const found = lines(some, Math.max);
  const least = Math.min(...some.map((point) => point.value)), most = Math.max(...some.map((p) => p.value));
  figure("range-grid", id, title, () => ({
    traces: found.map((line) => ({ ...traceOf(line, ".2~%", false), mode: "markers" })),
    label: describe(title, found, ""),
    layout: { xaxis: layerAxis(some), showlegend: true,
      yaxis: { title: "fraction of elements", type: "log", exponentformat: "power", dtick: 1,
        range: [Math.floor(Math.log10(least) - 0.3), Math.min(0.1, Math.ceil(Math.log10(most) + 0.3))] } },
  }), "Logarithmic; tensors of which none do are not shown.");
}
