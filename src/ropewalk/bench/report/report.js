"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const redraws = [];
  const kept = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");

  // What was chosen stays in the address.
  function keep(key, value) {
    if (value) kept.set(key, value);
    else kept.delete(key);
    const text = kept.toString();
    if (text || location.hash.includes("=")) history.replaceState(null, "", "#" + text);
  }

  function make(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  // Light and dark

  const button = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme === "dark";
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function setTheme(dark) {
    root.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", String(dark));
    button.textContent = dark ? "Light" : "Dark";
    redraws.forEach((redraw) => redraw());
  }
  button.addEventListener("click", () => {
    setTheme(!isDark());
    keep("theme", root.dataset.theme);
  });
  prefersDark.addEventListener("change", (event) => kept.has("theme") || setTheme(event.matches));
  addEventListener("beforeprint", () => isDark() && setTheme(false));
  matchMedia("(max-width: 800px)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));

  // Charts

  const inkOf = ({ style }) => style[isDark() ? "dark" : "light"];
  const escaped = (text) =>
    text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\n/g, "<br>");

  function marker(series, size = 9) {
    const ink = inkOf(series);
    const { symbol } = series.style;
    const stroke = /^line|-open/.test(symbol) ? 2 : 0.5;
    return { symbol, size, color: ink, line: { width: stroke, color: ink } };
  }

  function layoutOf(height, more = {}) {
    const axis = { gridcolor: colour("--grid"), zeroline: false, linecolor: colour("--line"), automargin: true };
    return {
      height,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: colour("--text") },
      hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--text") }, align: "left" },
      hovermode: "closest",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--text") },
      margin: { l: 10, r: 10, t: 10, b: 40 },
      ...more,
      xaxis: { ...axis, ...more.xaxis },
      yaxis: { ...axis, ...more.yaxis },
    };
  }

  const config = {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  // The legend beside the plot, or below it on a narrow page, a line for each name.
  function withLegend(node, names, layout) {
    const lines = 20 * names.length + 20;
    if (node.clientWidth >= 760) {
      return { ...layout, height: Math.max(layout.height, lines + 50), legend: { x: 1.01, y: 1 } };
    }
    const below = { orientation: "h", entrywidth: 1, entrywidthmode: "fraction", x: 0, yref: "container", y: 0, yanchor: "bottom" };
    const margin = { ...layout.margin, b: layout.margin.b + lines };
    return { ...layout, height: layout.height + lines, margin, legend: below };
  }

  // Selects that narrow down a list of panels one after another: a choice above decides what there is below.
  function cascade(node, panels, keys, draw) {
    const selects = keys.map(([, title]) => {
      const select = make("select", { ariaLabel: title });
      const label = make("label", {}, title, select);
      node.append(label);
      select.addEventListener("change", () => update());
      return select;
    });
    function update() {
      let left = panels;
      keys.forEach(([key], index) => {
        const select = selects[index];
        const values = [...new Set(left.map((panel) => panel[key]))];
        const chosen = values.includes(select.value) ? select.value : values[0];
        select.replaceChildren(...values.map((value) => make("option", { value, textContent: value })));
        select.value = chosen;
        select.parentElement.hidden = new Set(panels.map((panel) => panel[key])).size < 2;
        left = left.filter((panel) => panel[key] === chosen);
      });
      draw(left[0]);
    }
    update();
  }

  function chart(id, panels, keys, plot) {
    const figure = document.getElementById(id);
    if (!panels.length) {
      figure.hidden = true;
      return;
    }
    const node = figure.querySelector(".plot");
    const note = figure.querySelector(".note");
    let current;
    const redraw = () => {
      const { traces, layout, text } = plot(current, node);
      note.textContent = text || "";
      Plotly.react(node, traces, layout, config);
    };
    cascade(figure.querySelector(".controls"), panels, keys, (panel) => {
      current = panel;
      redraw();
    });
    redraws.push(redraw);
    return { redraw, controls: figure.querySelector(".controls") };
  }

  // Time and rate

  const metric = make("select", { ariaLabel: "metric" });
  let wantedMetric;

  function chooseMetric(panel) {
    const keys = Object.keys(panel.metrics);
    const chosen = keys.includes(wantedMetric) ? wantedMetric : keys[0];
    metric.replaceChildren(...keys.map((value) => make("option", { value, textContent: panel.metrics[value] })));
    metric.value = chosen;
    return chosen;
  }

  function plotSpeed(panel, node) {
    const key = chooseMetric(panel);
    const byLength = panel.axis === "length";
    const isTime = key === "time" || key === "graph";
    const traces = panel.series
      .filter((series) => series.points.some((point) => point && point[key] !== undefined))
      .map((series) => speedTrace(panel, series, key, byLength, isTime));
    const names = traces.map((trace) => trace.name);
    const logarithmic = isTime || (byLength && key !== "share");
    const values = traces.flatMap((trace) => (byLength ? trace.y : trace.x)).filter((one) => one !== null);
    const value = { title: { text: panel.metrics[key] }, ...(logarithmic ? logAxis(values) : { rangemode: "tozero" }) };
    if (key === "share") value.tickformat = ".0%";
    if (byLength) {
      const length = { title: { text: "tokens" }, type: "log", tickvals: panel.x, ticktext: panel.x.map(shortLength) };
      return { traces, layout: withLegend(node, names, layoutOf(430, { xaxis: length, yaxis: value })) };
    }
    const cases = { autorange: "reversed", type: "category", categoryarray: panel.x.map(escaped), tickfont: { size: 12 } };
    const height = 80 + Math.max(3, panel.x.length) * 34;
    const text = isTime ? "Marks are medians, whiskers the 10 % and 90 % quantiles." : "";
    return { traces, text, layout: withLegend(node, names, layoutOf(height, { xaxis: value, yaxis: cases })) };
  }

  // Ticks at 1, 2 and 5 times powers of ten, or where there would be many, at the powers.
  function logAxis(values) {
    const [low, high] = [Math.log10(Math.min(...values)), Math.log10(Math.max(...values))];
    const steps = high - low > 3.5 ? [1] : [1, 2, 5];
    const tickvals = [];
    for (let power = Math.floor(low) - 1; power <= high + 1; power++) {
      tickvals.push(...steps.map((step) => Number(`${step}e${power}`)));
    }
    return { type: "log", tickvals, ticktext: tickvals.map((tick) => (tick < 1e5 ? String(tick) : tick.toExponential())) };
  }

  const shortLength = (tokens) => (tokens % 1024 ? String(tokens) : `${tokens / 1024}k`);

  function speedTrace(panel, series, key, byLength, isTime) {
    const has = (point) => point && point[key] !== undefined;
    const values = series.points.map((point) => (has(point) ? point[key] : null));
    const spread = isTime && {
      type: "data",
      symmetric: false,
      array: series.points.map((point) => (has(point) ? point[key + "_high"] : 0)),
      arrayminus: series.points.map((point) => (has(point) ? point[key + "_low"] : 0)),
      thickness: 1,
      width: 0,
      color: inkOf(series),
    };
    const hovers = series.points.map((point) => (point ? escaped(point.text) : ""));
    return {
      type: "scatter",
      name: escaped(series.name),
      mode: byLength ? "lines+markers" : "markers",
      x: byLength ? panel.x : values,
      y: byLength ? values : panel.x.map(escaped),
      [byLength ? "error_y" : "error_x"]: spread || undefined,
      connectgaps: true,
      marker: marker(series, byLength ? 7 : 10),
      line: { color: inkOf(series), width: 1.6, dash: series.style.dash },
      text: hovers,
      hovertemplate: "<b>%{fullData.name}</b><br>%{text}<extra></extra>",
    };
  }

  // Roofline

  function plotRoofline(panel, node) {
    const traces = panel.series.map((series) => ({
      type: "scatter",
      mode: "markers",
      name: escaped(series.name),
      x: series.x,
      y: series.y,
      marker: marker(series),
      text: series.text.map(escaped),
      hovertemplate: "<b>%{fullData.name}</b><br>%{text}<br>%{x:.3g} operations a byte<extra></extra>",
    }));
    const xs = panel.series.flatMap((series) => series.x);
    traces.unshift(...roofTraces(panel.roofs, Math.min(...xs) / 4, Math.max(...xs) * 4));
    const names = traces.map((trace) => trace.name);
    const xaxis = { title: { text: "operations per byte" }, ...logAxis(traces.flatMap((trace) => trace.x)) };
    const yaxis = { title: { text: "TFLOP/s" }, ...logAxis(traces.flatMap((trace) => trace.y)) };
    return { traces, text: panel.note, layout: withLegend(node, names, layoutOf(400, { xaxis, yaxis })) };
  }

  function roofTraces({ copy, matmul }, low, high) {
    const roof = (name, points, dash) => ({
      type: "scatter",
      mode: "lines",
      name,
      x: points.map(([x]) => x),
      y: points.map(([, y]) => y),
      line: { color: colour("--muted"), width: 1.5, dash },
      hovertemplate: `${name}: %{y:.3g} TFLOP/s<extra></extra>`,
    });
    const reached = (x) => (x * copy) / 1e3;
    const ridge = copy && matmul ? (matmul * 1e3) / copy : null;
    const traces = [];
    if (copy) {
      const end = ridge ? Math.min(Math.max(ridge, low), high) : high;
      if (end > low) traces.push(roof("copy", [[low, reached(low)], [end, reached(end)]], "solid"));
    }
    if (matmul) {
      const start = ridge ? Math.max(ridge, low) : low;
      if (start < high) traces.push(roof("matrix product", [[start, matmul], [high, matmul]], "dash"));
    }
    return traces;
  }

  // Bars of one case

  function plotBars(unit) {
    return (panel, node) => {
      const names = panel.bars.map((bar) => escaped(bar.name));
      const bars = (name, values, pattern, texts, labels) => ({
        type: "bar",
        orientation: "h",
        name,
        x: values,
        y: names,
        marker: { color: panel.bars.map(inkOf), pattern: { shape: pattern, fgcolor: colour("--page"), size: 6 } },
        text: labels.map(escaped),
        textposition: "outside",
        cliponaxis: false,
        hovertext: texts.map(escaped),
        hovertemplate: "<b>%{y}</b><br>%{hovertext}<extra></extra>",
      });
      const each = (key) => panel.bars.map((bar) => bar[key] ?? null);
      const traces = [bars("call", each("value"), "", each("text"), each("label"))];
      const forwards = each("forward");
      const both = forwards.some((value) => value !== null);
      if (both) {
        const texts = names.map(() => "the forward call that records for autograd");
        traces.push(bars("forward that records", forwards, "/", texts, forwards.map((value) => value?.toFixed(0) ?? "")));
      }
      const high = Math.max(...panel.bars.map((bar) => bar.value), ...forwards, panel.floor || 0);
      const layout = layoutOf(60 + names.length * (both ? 38 : 26), {
        bargap: 0.25,
        showlegend: false,
        xaxis: { title: { text: unit }, range: [0, high * (node.clientWidth < 500 ? 1.3 : 1.16) || 1] },
        yaxis: { type: "category", autorange: "reversed", categoryarray: names },
      });
      if (panel.floor) layout.shapes = [floorLine(panel.floor)];
      const notes = [];
      if (both) notes.push("Solid: the backward call. Hatched: the forward call that records for it.");
      if (panel.floor) notes.push("The line: inputs, outputs, gradients, and rotated q and k.");
      return { traces, layout, text: notes.join(" ") };
    };
  }

  const floorLine = (x) => ({
    type: "line",
    x0: x,
    x1: x,
    yref: "paper",
    y0: 0,
    y1: 1,
    line: { color: colour("--text"), width: 1.5, dash: "dot" },
  });

  // The table

  const { columns, rows, missing } = data.table;
  const visible = columns.map((column, index) => index).filter((index) => columns[index].shown);
  const indexOf = (key) => columns.findIndex((column) => column.key === key);
  const textOf = (cell) => (cell === null ? missing : Array.isArray(cell) ? cell[1] : String(cell));
  const valueOf = (cell) => (Array.isArray(cell) ? cell[0] : cell);
  const haystacks = rows.map((row) => row.map((cell) => (cell === null ? "" : textOf(cell))).join(" ").toLowerCase());
  const body = document.querySelector("#table tbody");
  const head = make("tr");
  const filters = {};
  let sorting = { key: kept.get("sort"), descending: kept.get("order") === "descending" };
  let shown = [];

  function compare(one, other, descending) {
    if (one === null || other === null) return (one === null) - (other === null);
    const order = typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true });
    return descending ? -order : order;
  }

  function updateTable() {
    const words = filters.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = Object.entries(filters).filter(([key, field]) => key !== "text" && field.value);
    shown = rows
      .map((_, index) => index)
      .filter((index) => words.every((word) => haystacks[index].includes(word)))
      .filter((index) => chosen.every(([key, field]) => rows[index][indexOf(key)] === field.value));
    const at = indexOf(sorting.key);
    if (at >= 0) shown.sort((a, b) => compare(valueOf(rows[a][at]), valueOf(rows[b][at]), sorting.descending));
    const statusAt = indexOf("status");
    body.replaceChildren(...shown.map((index) => rowNode(rows[index], rows[index][statusAt])));
    document.getElementById("count").textContent = `${shown.length} of ${rows.length} rows`;
    for (const cell of head.children) {
      const order = sorting.descending ? "descending" : "ascending";
      cell.setAttribute("aria-sort", cell.dataset.key === sorting.key ? order : "none");
    }
  }

  function rowNode(row, status) {
    const node = make("tr", { className: status });
    for (const index of visible) {
      const cell = make("td", { textContent: textOf(row[index]) });
      const { key, number } = columns[index];
      if (number) cell.className = "number-cell";
      else if (["case", "reason", "shape", "variant"].includes(key)) cell.className = key;
      if (key === "implementation") cell.prepend(chip(data.colours[row[index]]));
      node.append(cell);
    }
    return node;
  }

  function chip(colours) {
    const node = make("i", { className: "chip" });
    for (const [name, value] of Object.entries(colours)) node.style.setProperty(name, value);
    return node;
  }

  function sortBy(key) {
    sorting = { key, descending: sorting.key === key && !sorting.descending };
    keep("sort", key);
    keep("order", sorting.descending ? "descending" : "");
    updateTable();
  }

  function buildTable() {
    for (const index of visible) {
      const { key, title, number } = columns[index];
      const sorter = make("button", { type: "button", textContent: title });
      sorter.addEventListener("click", () => sortBy(key));
      const cell = make("th", { scope: "col", className: number ? "number-cell" : "" }, sorter);
      cell.dataset.key = key;
      head.append(cell);
    }
    document.querySelector("#table thead").append(head);
    const form = document.getElementById("filters");
    form.addEventListener("submit", (event) => event.preventDefault());
    addFilter(form, "text", "text", make("input", { type: "search", placeholder: "words of a row" }), "input");
    for (const key of ["record", "implementation", "direction", "dtype", "status"]) {
      if (indexOf(key) < 0) continue;
      const { title } = columns[indexOf(key)];
      const values = [...new Set(rows.map((row) => row[indexOf(key)]))].filter((value) => value !== null);
      const options = values.map((value) => make("option", { value, textContent: value }));
      addFilter(form, key, title, make("select", {}, make("option", { value: "", textContent: "all" }), ...options), "change");
    }
    updateTable();
  }

  function addFilter(form, key, title, field, event) {
    filters[key] = field;
    field.name = key;
    field.value = kept.get(key) || "";
    if (field.selectedIndex === -1) field.value = "";
    form.append(make("label", {}, title, field));
    field.addEventListener(event, () => {
      keep(key, field.value);
      updateTable();
    });
  }

  const quoted = (value) => (/[",\n]/.test(value) ? `"${value.replace(/"/g, '""')}"` : value);

  function csv() {
    const lines = shown.map((index) => rows[index].map((cell) => String(valueOf(cell) ?? "")));
    return [columns.map((column) => column.title), ...lines].map((line) => line.map(quoted).join(",")).join("\n") + "\n";
  }

  async function copyTable() {
    const text = csv();
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = make("textarea", { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    document.getElementById("copied").textContent = `rows copied: ${shown.length}`;
  }

  // Start

  setTheme(kept.has("theme") ? kept.get("theme") === "dark" : prefersDark.matches);
  const place = [["record", "record"], ["what", "what"], ["dtype", "dtype"]];
  const speed = chart("speed", data.speed, [...place, ["over", "cases"]], plotSpeed);
  if (speed) {
    speed.controls.append(make("label", {}, "metric", metric));
    metric.addEventListener("change", () => {
      wantedMetric = metric.value;
      speed.redraw();
    });
  }
  chart("roofline", data.roofline, place, plotRoofline);
  const bars = [["record", "record"], ["what", "what"], ["case", "case"]];
  chart("host", data.host, bars, plotBars("host time, µs"));
  chart("memory", data.memory, bars, plotBars("MiB"));
  if (!["speed", "roofline", "host", "memory"].some((id) => data[id].length)) document.getElementById("charts").hidden = true;
  buildTable();
  document.getElementById("copy").addEventListener("click", copyTable);
  root.dataset.ready = "true";
})();
