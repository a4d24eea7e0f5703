// Convergence, sensitivity, the budget's curve and the experts: only where the report has them.
const LINES = 60; // tensors drawn in the background of a convergence plot

function startConvergence() {
  const found = report.convergence;
  if (!found) return;
  const names = Object.keys(found.tensors), counts = found.counts;
  if (found.before === null) return note("convergence-grid", "", "There are too few points to compare.");
  const stored = names.filter((name) => found.tensors[name].scale);
  const known = stored.filter((name) => found.tensors[name].sqnr_db);
  const where = known.length < stored.length ? ", where the error is known" : "";
  const sets = [
    ["converged-scale", "Scale, relative to that of all samples", stored, (t) => t.scale, "ratio"],
    ["converged-sqnr", `What stopping there would have cost${where}`, known, (t) => t.sqnr_db, "loss"],
    ["converged-absmax", "Largest magnitude where no scale is stored", names.filter((name) => !found.tensors[name].scale),
      (t) => t.absmax, "ratio"],
  ];
  for (const [id, title, some, value, kind] of sets)
    if (some.length) convergenceFigure(id, title, some, value, kind, counts);
}

function convergenceFigure(id, title, names, value, kind, counts) {
  const tensors = report.convergence.tensors;
  const course = (name) => {
    const values = value(tensors[name]), last = values[values.length - 1];
    if (kind === "ratio") return values.map((v) => (last > 0 ? v / last : null));
    return values.map((v) => (v === null || last === null ? 0 : Math.max(0, last - v)));
  };
  const all = names.map((name) => ({ name, y: course(name) }));
  const far = ({ y }) => Math.max(...y.map((v) => (kind === "ratio" ? Math.abs(Math.log2(v || 1)) : v)));
  if (Math.max(...all.map(far)) < 1e-9)
    return note("convergence-grid", title, `The same for ${counts.join(", ")} samples.`);
  const before = report.convergence.before;
  const late = ({ y }) => { const v = y[before]; return kind === "ratio" ? Math.abs(Math.log2(v || 1)) : v; };
  all.sort((a, b) => late(b) - late(a) || far(b) - far(a));
  const named = all.slice(0, 4), rest = all.slice(4, LINES);
  const unit = kind === "ratio" ? ".3f" : ".2f";
  figure("convergence-grid", id, title, () => ({
    traces: [
      ...rest.map((line, index) => ({ type: "scatter", mode: "lines", x: counts, y: line.y, name: "other tensors",
        legendgroup: "rest", showlegend: index === 0, opacity: 0.45, line: { color: color("muted"), width: 1 },
        hovertemplate: `${line.name}<br>%{y:${unit}}<extra></extra>` })),
      ...named.map((line, index) => ({ type: "scatter", mode: "lines+markers", x: counts, y: line.y,
        name: short(line.name), line: { color: color(STYLES[index][0]), width: 2, dash: STYLES[index][2] },
        marker: { symbol: STYLES[index][1], size: 8, color: color(STYLES[index][0]) },
        hovertemplate: `${line.name}<br>%{x} samples: %{y:${unit}}<extra></extra>` })),
    ],
    label: `${title}: at ${counts[before]} samples the farthest is ${named[0].name},` +
      ` ${digits(named[0].y[before])}${kind === "ratio" ? " of its last" : " dB"}`,
    layout: { showlegend: true,
      xaxis: { title: "samples", type: "log", tickvals: counts, ticktext: counts.map(String) },
      yaxis: kind === "ratio" ? { title: "ratio" }
        : { title: "dB lost", range: [-0.02, Math.max(0.5, 1.1 * Math.max(...all.map(far)))] },
      shapes: kind === "ratio" ? [] : [{ type: "line", xref: "paper", x0: 0, x1: 1, layer: "below",
        y0: report.convergence.tolerance.sqnr_db, y1: report.convergence.tolerance.sqnr_db,
        line: { color: color("look"), dash: "dash", width: 1.5 } }] },
  }), kind === "loss" ? "Dashed: what a last step may cost." : "");
}

function startSensitivity() {
  const found = report.sensitivity;
  if (!found) return;
  const units = [...found.units].sort((a, b) => b.kl - a.kl).slice(0, 30).reverse();
  byId("plot-sensitivity").style.height = `${90 + 22 * units.length}px`;
  plot("plot-sensitivity", () => ({
    traces: [{
      type: "bar", orientation: "h", x: units.map((unit) => 1000 * Math.max(0, unit.kl)), y: units.map((unit) => short(unit.name)),
      error_x: { type: "data", array: units.map((unit) => 1000 * (unit.kl_error || 0)), color: color("text"), thickness: 1, width: 3 },
      customdata: units.map((unit) => [unit.format, decibels(unit.input_sqnr_db), decibels(unit.input_small_sqnr_db),
        decibels(unit.weight_sqnr_db), decibels(unit.output_sqnr_db)]),
      hovertemplate: "%{y} (%{customdata[0]})<br>KL %{x:.3g} × 10⁻³ nats<br>SQNR dB: input %{customdata[1]}, its small values" +
        " %{customdata[2]}, weights %{customdata[3]}, output %{customdata[4]}<extra></extra>",
      marker: { color: color("bar") },
    }],
    label: `KL by unit; the most sensitive is ${units[units.length - 1].name}, ${digits(units[units.length - 1].kl)} nats`,
    layout: { xaxis: { title: "KL, 10⁻³ nats a token" + (found.units.length > 30 ? " (the 30 largest)" : ""), rangemode: "tozero",
      nticks: 6 } },
  }));
}

function startBudget() {
  const found = report.budget;
  if (!found) return;
  const key = found.metric === "kl" ? "kl" : "perplexity", curve = found.curve;
  const name = key === "kl" ? "KL, nats a token" : "perplexity";
  const text = (at) => (at.promoted ? `${short(at.promoted)} → ${at.to}` : "the recipe everywhere");
  plot("plot-budget", () => ({
    traces: [{
      type: "scatter", mode: "lines+markers", x: curve.map((at) => at.weight_bytes / 1e6), y: curve.map((at) => at[key]),
      text: curve.map(text), hovertemplate: "%{text}<br>%{x:.4~g} MB, %{y:.4~g}<extra></extra>", showlegend: false,
      line: { color: color("c0"), width: 2 }, marker: { size: 9, color: color("c0") },
      error_y: { type: "data", symmetric: false, array: curve.map((at) => boundOf(found, at, key) - at[key]),
        arrayminus: curve.map(() => 0), color: color("muted"), thickness: 1.5, width: 5 },
    }],
    label: `${name} against the size of the weights, ${curve.length} steps, from ${digits(curve[0][key])} to ${digits(found.reached)}`,
    layout: {
      xaxis: { title: "weights, MB" }, yaxis: { title: name, exponentformat: "power" },
      shapes: limitOf(found, key).map((limit) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit, y1: limit,
        line: { color: color("look"), dash: "dash", width: 2 } })),
      annotations: limitOf(found, key).map((limit) => ({ xref: "paper", x: 0, y: limit, yanchor: "bottom", xanchor: "left",
        text: `budget ${digits(limit)}`, showarrow: false, font: { color: color("look") } })),
    },
  }));
  byId("budget-steps").append(...curve.map((at) =>
    element("li", {}, `${text(at)}: ${digits(at.weight_bytes / 1e6, 4)} MB, ${key === "kl" ? "KL" : key} ${digits(at[key], 4)}`)));
}

// The upper end of the confidence interval, which is compared with the budget.
function boundOf(found, at, key) {
  if (at.bound === undefined || at.bound === null) return at[key];
  const [reference] = key === "kl" ? [0] : limitOf({ ...found, limit: 0 }, key);
  return key === "kl" ? at.bound : reference === undefined ? at[key] : reference * (1 + at.bound);
}

// A perplexity budget is a relative change; only the reference says what it is in perplexity.
function limitOf(found, key) {
  if (key === "kl") return [found.limit];
  const reference = report.sensitivity ? report.sensitivity.reference_perplexity : found.reference_perplexity;
  return reference ? [reference * (1 + found.limit)] : [];
}

function startExperts() {
  const found = report.experts;
  if (!found) return;
  const layers = Object.keys(found.layers), tokens = layers.map((layer) => found.layers[layer].tokens);
  const most = Math.max(...tokens.map((row) => row.length));
  byId("plot-experts").style.height = `${120 + 26 * Math.max(4, layers.length)}px`;
  plot("plot-experts", () => ({
    traces: [{
      type: "heatmap", z: tokens.map((row) => row.map((count) => Math.log10(count + 1))), x: [...Array(most).keys()],
      y: layers.map((layer) => layer.replace("model.layers.", "")), customdata: tokens, colorscale: "Cividis", xgap: most > 64 ? 0 : 1, ygap: 1,
      hovertemplate: "layer %{y}, expert %{x}: %{customdata} tokens<extra></extra>",
      colorbar: { title: { text: "tokens" }, tickvals: [0, 1, 2, 3, 4, 5, 6, 7],
        ticktext: ["0", "10", "100", "1k", "10k", "100k", "1M", "10M"], thickness: 12 },
    }, {
      type: "scatter", mode: "markers", name: `under ${found.min_tokens}`, showlegend: true,
      x: tokens.flatMap((row) => row.flatMap((count, expert) => (count < found.min_tokens ? [expert] : []))),
      y: tokens.flatMap((row, at) => row.flatMap((count) => (count < found.min_tokens ? [layers[at].replace("model.layers.", "")] : []))),
      hoverinfo: "skip", marker: { symbol: "x-thin", size: 9, line: { color: "#ff6a3d", width: 2 } },
    }],
    label: `Tokens seen by each expert of ${layers.length} layers; ${found.fallback.length} saw fewer than ${found.min_tokens}`,
    layout: { xaxis: { title: "expert", tick0: 0, dtick: Math.ceil(most / 12), range: [-0.5, most - 0.5], showgrid: false },
      yaxis: { title: "layer", type: "category", autorange: "reversed", showgrid: false } },
  }));
}
