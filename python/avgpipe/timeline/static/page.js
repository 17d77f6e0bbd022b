"use strict";
// Draws the charts of a page from the data in it. Texts of runs reach the document as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // Hues that readers who confuse red and green tell apart; of runs on light and on dark ground.
  const COLORS = {
    light: ["#2a6fb0", "#d9780f", "#1b8a63", "#a04a94", "#c0453c", "#7c6a4c", "#1d8fa6", "#937800"],
    dark: ["#6aaee8", "#f2a044", "#4fc197", "#cf86c5", "#ea827a", "#b7a27c", "#6fcfe3", "#e3c53a"],
  };
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  // Light and dark of each pipeline.
  const HUES = [["#b5d4f0", "#2a6fb0"], ["#fcd9a4", "#d9780f"], ["#b0e0cc", "#1b8a63"], ["#e8c6e3", "#a04a94"],
    ["#f5c9c5", "#c0453c"], ["#d8d0c1", "#7c6a4c"]];
  // Of the parts of a worker's time; what is no work is grey, or the host's yellow.
  const PARTS = {
    "forward": "#b5d4f0", "backward": "#2a6fb0", "backward, inputs": "#2a6fb0", "backward, weights": "#7fa8d1",
    "update": "#d9780f", "averaging": "#a04a94", "sending": "#1b8a63", "waiting for an activation": "#c9ced4",
    "waiting for a gradient": "#a3aab2", "other waits": "#7d858e", "data loader": "#e8d98a",
    "between results": "#c9a400", "other work of the host": "#a08a3a", "runtime": "#c0453c", "before and after": "#eceff2",
  };
  const PATTERNS = {"waiting for an activation": "/", "waiting for a gradient": "\\", "other waits": "x"};
  const CONFIG = {displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"]};
  const TABLE_ROWS = 500;
  const US = 1e6; // microseconds of a second: times of events are in them
  const MINUS = "\u2212";
  const state = {along: "samples", hidden: new Set()};
  const several = data.runs.length > 1;

  // ---- small helpers ----

  const byId = (id) => document.getElementById(id);
  const plotOf = (id) => byId(id).querySelector(".plot");
  // Plotly reads some tags in texts: what comes from a run's files must not be any.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function element(name, text, attributes = {}) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const palette = () => COLORS[isDark() ? "dark" : "light"];
  const colorOf = (n) => palette()[n % palette().length];

  function axis(title, more = {}) {
    const line = css("--line");
    return {title: {text: title, standoff: 8}, gridcolor: line, linecolor: line, zerolinecolor: line,
      automargin: true, ...more};
  }

  function layoutOf(more) {
    return {
      paper_bgcolor: css("--ground"), plot_bgcolor: css("--ground"), font: {color: css("--ink"), size: 12},
      hoverlabel: {bgcolor: css("--raised"), bordercolor: css("--line"), font: {color: css("--ink")}, align: "left"},
      margin: {l: 60, r: 15, t: 10, b: 45}, hovermode: "closest", height: 300, ...more,
    };
  }

  // Of a chart whose plot is so high: a legend below it with room for its entries on a screen of this width.
  function withLegend(plot, high, names, left = 90) {
    const columns = Math.max(1, Math.floor(plot.clientWidth / (60 + 6.5 * Math.max(...names.map((n) => n.length), 1))));
    const legend = names.length > 1 ? 20 * Math.ceil(names.length / columns) + 10 : 0;
    return {height: high + 65 + legend, margin: {l: left, r: 15, t: 10, b: 55 + legend}, showlegend: legend > 0,
      legend: {orientation: "h", y: -55 / high, yanchor: "top", traceorder: "normal", font: {size: 11}, maxheight: 0.9}};
  }

  function secondsText(seconds) {
    const [unit, per] = seconds >= 2 ? ["s", 1] : seconds >= 2e-3 ? ["ms", 1e3] : ["\u00b5s", 1e6];
    const value = seconds * per;
    return `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${unit}`;
  }

  // ---- lines ----

  const AXES = {samples: "samples trained on", seconds: "seconds of training"};

  function lineTrace(chart, line) {
    // One run: a color for each line. Several: a color for each run, and dashes for its lines.
    const number = several ? line.run : line.part, dash = several ? line.part : Math.floor(line.part / 8);
    const name = several ? `${data.runs[line.run]}: ${line.name}` : line.name;
    const value = chart.scale === "share" ? "%{y:.1%}" : "%{y:.5~g}";
    return {
      type: "scatter", mode: line.style === "marks" ? "lines+markers" : "lines", name: plain(name),
      x: line[state.along], y: line.values, opacity: line.style === "faint" ? 0.35 : 1, meta: {run: line.run},
      line: {color: colorOf(number), width: line.style === "faint" ? 1 : 1.8, dash: DASHES[dash % DASHES.length]},
      marker: {size: 6}, visible: !state.hidden.has(line.run), showlegend: line.style !== "faint",
      hovertemplate: `${plain(name)}<br>${plain(chart.unit)}: ${value}<br>at %{x:,.6~g} ${state.along}<extra></extra>`,
    };
  }

  function drawChart(chart) {
    const y = axis(chart.unit, {rangemode: chart.scale === "zero" ? "tozero" : "normal"});
    if (chart.scale === "log") y.type = "log";
    if (chart.scale === "share") Object.assign(y, {range: [0, 1.02], tickformat: ".0%"});
    const traces = chart.lines.map((line) => lineTrace(chart, line)), plot = plotOf(chart.id);
    const names = traces.filter((trace) => trace.showlegend && trace.visible).map((trace) => trace.name);
    const along = axis(AXES[state.along], {rangemode: "tozero"});
    Plotly.react(plot, traces, layoutOf({xaxis: along, yaxis: y, ...withLegend(plot, 230, names, 60)}), CONFIG);
  }

  function chartTable(chart) {
    const rows = [];
    for (const line of chart.lines.filter((line) => !state.hidden.has(line.run) && line.style !== "faint")) {
      const name = several ? `${data.runs[line.run]}: ${line.name}` : line.name;
      line.values.forEach((value, n) => {
        if (value !== null) rows.push([name, line.samples[n], line.seconds[n], value]);
      });
    }
    return [["line", "samples", "seconds", chart.unit], rows];
  }

  // ---- where time went ----

  const partsOf = (bars) => Object.entries(bars.parts).map(([name, shares]) => ({name, shares}));

  function drawBars(bars) {
    const rows = bars.rows.map((_, n) => n).filter((n) => !state.hidden.has(bars.runs[n]));
    const labels = rows.map((n) => plain(bars.rows[n]));
    const traces = partsOf(bars).map((part) => ({
      type: "bar", orientation: "h", name: plain(part.name), y: labels, x: rows.map((n) => part.shares[n]),
      marker: {color: PARTS[part.name] || "#888888", line: {width: 0.5, color: css("--ground")},
        pattern: {shape: PATTERNS[part.name] || "", fgcolor: "#ffffff", size: 6, fillmode: "overlay"}},
      hovertemplate: `%{y}<br>${plain(part.name)}: %{x:.1%} of the time<extra></extra>`,
    }));
    const plot = plotOf(bars.id), names = traces.map((trace) => trace.name);
    Plotly.react(plot, traces, layoutOf({
      barmode: "stack", xaxis: axis("share of the worker's time", {tickformat: ".0%", range: [0, 1]}), bargap: 0.25,
      yaxis: axis("", {autorange: "reversed", type: "category"}), ...withLegend(plot, 20 + 34 * labels.length, names),
    }), CONFIG);
  }

  function barsTable(bars) {
    const rows = bars.rows.map((name, n) => [name, ...partsOf(bars).map((p) => `${(100 * p.shares[n]).toFixed(1)} %`)]);
    return [["worker", ...partsOf(bars).map((part) => part.name)], rows.filter((_, n) => !state.hidden.has(bars.runs[n]))];
  }

  // ---- timelines ----

  // By kind, and "recv" and "host" by detail: fill of the pipeline's hue, or a color; place in the row; pattern.
  const LOOKS = {
    "F": {fill: "light"}, "B": {fill: "dark"}, "I": {fill: "dark"}, "W": {fill: "dark", opacity: 0.6},
    "U": {fill: "none"}, "average": {fill: "dark", pattern: "x"},
    "recv": {fill: "#c9ced4", place: "wait"}, "recv F": {fill: "#c9ced4", place: "wait", pattern: "/"},
    "recv B": {fill: "#c9ced4", place: "wait", pattern: "\\"},
    "host": {fill: "#e8d98a", place: "whole"}, "host caller": {fill: "#c9a400", place: "whole"},
    "host loader": {fill: "#e8d98a", place: "whole", pattern: "."}, "send": {fill: "dark", place: "below"},
  };
  const BAR = 0.66, STRIP = 0.1;

  class Timelines {
    constructor(block) {
      this.timelines = block.timelines;
      this.figure = byId(block.id);
      this.plot = plotOf(block.id);
      this.strip = element("div", undefined, {class: "strip", role: "img", "aria-label": "busy shares of all workers"});
      this.figure.insertBefore(this.strip, this.plot);
      this.controls(this.figure.querySelector(".extra"));
      this.choose(0);
    }

    controls(place) {
      if (this.timelines.length > 1) {
        const select = element("select", undefined, {"aria-label": "run"});
        this.timelines.forEach((t, n) => select.append(element("option", t.name, {value: n})));
        select.addEventListener("change", () => this.choose(Number(select.value)));
        place.append(select);
      }
      const steps = {"last batches": () => this.t.view, "everything": () => [0, this.t.end],
        "+": () => this.around(0.4), [MINUS]: () => this.around(2.5), "\u25c0": () => this.moved(-0.6),
        "\u25b6": () => this.moved(0.6)};
      const words = {"+": "zoom in", [MINUS]: "zoom out", "\u25c0": "earlier", "\u25b6": "later"};
      for (const [text, range] of Object.entries(steps)) {
        const button = element("button", text, {type: "button", "aria-label": words[text] || text});
        button.addEventListener("click", () => this.show(...range()));
        place.append(button);
      }
      this.status = element("span", "", {role: "status"});
      place.append(this.status);
    }

    around(factor) {
      const middle = (this.from + this.to) / 2, half = factor * (this.to - this.from) / 2;
      return [middle - half, middle + half];
    }

    moved(share) {
      const by = share * (this.to - this.from);
      return [this.from + by, this.to + by];
    }

    choose(number) {
      this.t = this.timelines[number];
      const e = this.t.events, count = e.took.length;
      this.start = new Float64Array(count);
      for (let n = 0, at = 0; n < count; n++) this.start[n] = at += e.start[n];
      this.show(...this.t.view);
    }

    show(from, to) {
      const whole = this.t.end, span = Math.min(whole, Math.max(2, to - from));
      this.from = Math.max(0, Math.min(from, whole - span));
      this.to = this.from + span;
      this.drawStrip();
      this.drawActions();
      fillTable(this.figure);
    }

    drawStrip() {
      const t = this.t, width = t.end / t.busy[0].length / US, rows = t.rows.map(plain);
      const centers = t.busy[0].map((_, n) => (n + 0.5) * width);
      const ground = css("--ground"), scale = [[0, ground], [1, isDark() ? "#6aaee8" : "#2a6fb0"]];
      const trace = {type: "heatmap", x: centers, y: rows, z: t.busy, zmin: 0, zmax: 100, colorscale: scale,
        showscale: false, ygap: 3, hovertemplate: "%{y}<br>%{x:.4~g} s: computing %{z} % of the time<extra></extra>"};
      const frame = {type: "rect", xref: "x", yref: "paper", x0: this.from / US, x1: this.to / US, y0: 0, y1: 1,
        line: {color: isDark() ? "#f2a044" : "#d9780f", width: 2}};
      const layout = layoutOf({height: 60 + 22 * rows.length, margin: {l: 90, r: 15, t: 5, b: 35}, shapes: [frame],
        xaxis: axis("", {range: [0, t.end / US], ticksuffix: " s"}), dragmode: "zoom",
        yaxis: axis("", {autorange: "reversed", fixedrange: true, type: "category"})});
      const config = {...CONFIG, displayModeBar: false};
      Plotly.react(this.strip, [trace], layout, config).then(() => this.follow(this.strip));
    }

    drawActions() {
      const {t, from, to} = this;
      const found = this.blocks(Math.max(300, this.plot.clientWidth - 110));
      const traces = found.map((group) => this.trace(group));
      const count = found.reduce((sum, group) => sum + group.blocks.length, 0);
      const actions = found.reduce((sum, group) => sum + group.blocks.reduce((s, b) => s + b.count, 0), 0);
      this.status.textContent = `${secondsText((to - from) / US)}, ${actions} events` +
        (count < actions ? `, drawn as ${count}: zoom in to tell them apart` : "");
      const older = from < t.full_from ? [{xref: "x", yref: "paper", x: Math.min(to, t.full_from) / US, y: 1,
        xanchor: "right", text: "older actions are summed up in the strip", showarrow: false}] : [];
      const names = {tickvals: t.rows.map((_, n) => n), ticktext: t.rows.map(plain), fixedrange: true};
      const layout = layoutOf({
        barmode: "overlay", dragmode: "zoom", annotations: older, bargap: 0,
        ...withLegend(this.plot, 20 + 72 * t.rows.length, traces.map((trace) => trace.name)),
        xaxis: axis("seconds since the record began", {range: [from / US, to / US], ticksuffix: " s"}),
        yaxis: axis("", {...names, range: [t.rows.length - 0.45, -0.5], zeroline: false}),
      });
      Plotly.react(this.plot, traces, layout, CONFIG).then(() => this.follow(this.plot));
    }

    // What is seen, by look and pipeline; neighbours that would be narrower than a few pixels are one block.
    blocks(pixels) {
      const e = this.t.events, {from, to} = this, pixel = (to - from) / pixels;
      const groups = new Map(), last = new Map();
      for (let n = 0; n < e.took.length; n++) {
        const start = this.start[n], end = start + e.took[n];
        if (end < from || start > to) continue;
        const kind = this.t.looks[e.look[n]].kind;
        const pipeline = kind === "recv" || kind === "host" ? -1 : e.pipeline[n];
        const key = `${e.look[n]} ${pipeline}`, row = `${key} ${e.row[n]}`;
        const before = last.get(row);
        if (before && start - before.end < pixel && e.took[n] < 4 * pixel) {
          before.end = Math.max(before.end, end);
          before.took += e.took[n];
          before.count += 1;
          before.last = n;
          continue;
        }
        const block = {start, end, took: e.took[n], count: 1, first: n, last: n, row: e.row[n]};
        last.set(row, block);
        if (!groups.has(key)) groups.set(key, {look: this.t.looks[e.look[n]], pipeline, blocks: []});
        groups.get(key).blocks.push(block);
      }
      // Waits lie underneath, then the host, then work.
      const depth = (look) => ({recv: 0, host: 1}[look.kind] ?? 2);
      return [...groups.values()].sort((a, b) => depth(a.look) - depth(b.look) || a.pipeline - b.pipeline);
    }

    trace({look, pipeline, blocks}) {
      const style = LOOKS[`${look.kind} ${look.detail}`] || LOOKS[look.kind] || {fill: "dark", place: "below"};
      const [light, dark] = HUES[Math.max(0, pipeline) % HUES.length];
      const fill = {light, dark, none: css("--ground")}[style.fill] || style.fill;
      const [offset, height] = this.place(style.place, pipeline);
      const pipelines = new Set(this.t.events.pipeline).size > 1 && pipeline >= 0;
      const few = blocks.length < 400, work = look.kind.length === 1;
      const rank = pipeline < 0 ? 2000 : 1000 + 10 * pipeline + Object.keys(LOOKS).indexOf(look.kind) / 10;
      return {
        type: "bar", orientation: "h", name: plain(look.word) + (pipelines ? `, pipeline ${pipeline}` : ""),
        base: blocks.map((b) => b.start / US), x: blocks.map((b) => (b.end - b.start) / US),
        y: blocks.map((b) => b.row + offset), width: height, opacity: style.opacity || 1, legendrank: rank,
        marker: {color: fill, line: style.fill === "none" ? {width: 1.5, color: dark} : {width: 0.4, color: css("--ground")},
          pattern: {shape: style.pattern || "", fgcolor: "#5a6068", size: 5, fillmode: "overlay"}},
        text: few && work ? blocks.map((b) => b.count > 1 ? "" : this.t.events.micro_batch[b.first] ?? "") : undefined,
        textposition: "inside", insidetextanchor: "middle", textangle: 0, textfont: {size: 10}, constraintext: "inside",
        hovertext: blocks.map((b) => this.words(look, b)), hovertemplate: "%{hovertext}<extra></extra>",
      };
    }

    // Offset of a bar's middle from the row's number, and its height.
    place(name, pipeline) {
      if (name === "whole") return [0, BAR];
      if (name === "below") return [BAR / 2 + 0.08, STRIP];
      const lanes = this.t.lanes, height = BAR / Math.max(1, lanes.length), lane = lanes.indexOf(pipeline);
      const offset = lanes.length && lane >= 0 ? (lane + 0.5) * height - BAR / 2 : 0;
      return [offset, name === "wait" ? 0.45 * height : height];
    }

    words(look, block) {
      const e = this.t.events, n = block.first, {word} = look;
      const where = plain(this.t.rows[block.row]) + (e.stage ? `, stage ${e.stage[n]}` : "");
      const at = `from ${(block.start / US).toFixed(this.to - this.from < US ? 5 : 3)} s on`;
      if (block.count > 1) {
        const batches = [e.batch[n], e.batch[block.last]].sort((a, b) => a - b);
        return `${where}<br>${plain(word)}, ${block.count} times<br>batches ${batches[0]} to ${batches[1]}` +
          `<br>${secondsText(block.took / US)} in all, ${at}`;
      }
      const micro = e.micro_batch[n] === null ? "" : ` of micro-batch ${e.micro_batch[n]}`;
      return `${where}<br>${plain(word)}${micro}<br>pipeline ${e.pipeline[n]}, batch ${e.batch[n]}` +
        `<br>${secondsText(block.took / US)}, ${at}`;
    }

    // Drags over a chart, and its double clicks, choose what is shown.
    follow(plot) {
      if (plot.dataset.followed) return;
      plot.dataset.followed = "yes";
      plot.on("plotly_relayout", (change) => {
        const low = change["xaxis.range[0]"] ?? (change["xaxis.range"] || [])[0];
        const high = change["xaxis.range[1]"] ?? (change["xaxis.range"] || [])[1];
        if (low !== undefined) this.show(low * US, high * US);
        else if (change["xaxis.autorange"]) this.show(...this.t.view);
      });
    }

    table() {
      const e = this.t.events, rows = [];
      for (let n = 0; n < e.took.length && rows.length < TABLE_ROWS; n++) {
        if (this.start[n] + e.took[n] < this.from || this.start[n] > this.to) continue;
        rows.push([this.t.rows[e.row[n]], this.t.looks[e.look[n]].word, e.pipeline[n], e.batch[n],
          e.micro_batch[n] ?? "-", (this.start[n] / 1e3).toFixed(3), (e.took[n] / 1e3).toFixed(3)]);
      }
      return [["worker", "what", "pipeline", "batch", "micro-batch", "from, ms", "takes, ms"], rows];
    }
  }

  // ---- tables beside charts ----

  const tables = new Map();

  function fillTable(figure) {
    const details = figure.querySelector("details"), make = tables.get(figure);
    if (!details.open || !make) return;
    const [headings, rows] = make(), place = details.querySelector("div");
    const table = element("table"), head = element("tr"), body = element("tbody");
    headings.forEach((heading) => head.append(element("th", heading, {scope: "col"})));
    // Of more rows every second, third or so.
    const step = Math.max(1, Math.ceil(rows.length / TABLE_ROWS));
    for (const row of rows.filter((_, n) => n % step === 0)) {
      const line = element("tr");
      row.forEach((cell) => line.append(element("td", typeof cell === "number" ? Number(cell.toPrecision(6)) : cell)));
      body.append(line);
    }
    table.append(element("thead"), body);
    table.firstChild.append(head);
    place.replaceChildren(table);
    if (step > 1) place.append(element("p", `every ${step}th of ${rows.length} rows`));
  }

  // ---- controls ----

  let timelines = [];

  function drawAll() {
    data.chart.forEach(drawChart);
    data.bars.forEach(drawBars);
    document.querySelectorAll(".swatch").forEach((swatch, n) => { swatch.style.background = colorOf(n); });
    tables.forEach((_, figure) => fillTable(figure));
  }

  function toggle(run, button) {
    const shown = state.hidden.delete(run);
    if (!shown) state.hidden.add(run);
    button.setAttribute("aria-pressed", String(shown));
    document.querySelectorAll(`[data-run="${run}"]`).forEach((part) => { part.hidden = !shown; });
    drawAll();
  }

  function redrawAll() {
    drawAll();
    timelines.forEach((t) => t.show(t.from, t.to));
  }

  function listen() {
    document.querySelectorAll("[data-toggles]").forEach((button) =>
      button.addEventListener("click", () => toggle(Number(button.dataset.toggles), button)));
    document.querySelectorAll("[data-along]").forEach((button) => button.addEventListener("click", () => {
      state.along = button.dataset.along;
      document.querySelectorAll("[data-along]").forEach((other) =>
        other.setAttribute("aria-pressed", String(other === button)));
      drawAll();
    }));
    byId("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      redrawAll();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
    document.querySelectorAll("figure details").forEach((details) =>
      details.addEventListener("toggle", () => fillTable(details.parentElement)));
  }

  data.chart.forEach((chart) => tables.set(byId(chart.id), () => chartTable(chart)));
  data.bars.forEach((bars) => tables.set(byId(bars.id), () => barsTable(bars)));
  byId("along").hidden = data.chart.length === 0;
  listen();
  drawAll();
  timelines = data.timelines.map((block) => new Timelines(block));
  timelines.forEach((t) => tables.set(t.figure, () => t.table()));
  document.documentElement.dataset.ready = "yes";
})();
