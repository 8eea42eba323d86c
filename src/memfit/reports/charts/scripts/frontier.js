"use strict";

// Memory against time: each plan or device a point, which opens what is written about it below.
Memfit.kind("frontier", ({ chart, content }) => {
  const { points, mark, line: stairs, kinds, figure_name: figureName, label_pixels: width } = content;
  const top = points.reduce((most, { bytes }) => Math.max(most, bytes), 1);
  const longest = points.reduce((most, { seconds }) => Math.max(most, seconds), 0);
  const unit = Memfit.unitOf(top);
  const [scale, timeName] = longest >= 1 ? [1, "s"] : longest >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  const place = ({ bytes, seconds }) => [bytes / unit.size, seconds * scale];

  function marks({ kind, name, colour, hollow, size, symbol, z }) {
    const item = hollow ? { color: Memfit.colour("--surface"), borderColor: Memfit.colour(colour), borderWidth: 1.5 } : { color: Memfit.colour(colour) };
    const labels = { show: true, silent: true, position: "top", color: Memfit.colour("--ink"), fontSize: 12, minMargin: 8,
      formatter: ({ data }) => data.label, width, overflow: "truncate" };
    return {
      name, type: "scatter", symbolSize: size, symbol: symbol || "circle", itemStyle: item, z: z || 4,
      data: points.filter((point) => point.kind === kind).map((point) => (
        { value: place(point), id: point.id, label: point.label, point })),
      label: labels, labelLayout: inside, cursor: "pointer", emphasis: { disabled: true }, clip: false,
    };
  }

  // Labels stay inside the picture, and those of the chosen plan and the plain step come first.
  // They are placed by their points: their own place is where the drawing before has moved them.
  const inside = ({ rect, labelRect: { width } }) => {
    const room = 6 + width / 2;
    return { hideOverlap: true, align: "center", verticalAlign: "bottom", y: rect.y - 4,
      x: Math.max(room, Math.min(chart.getWidth() - room, rect.x + rect.width / 2)) };
  };

  // Points keep clear of the edges, where they have their labels.
  function wide(values) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    if (content.scale === "log" && high >= 4 * low) {
      return { type: "log", logBase: 2, min: 0.8 * low, max: 1.25 * high,
        axisLabel: { formatter: (value) => Number(value.toPrecision(3)).toLocaleString("en-US"), showMinLabel: false, showMaxLabel: false } };
    }
    const margin = 0.09 * (high - low) || 0.1 * high || 1;
    return { type: "value", min: Math.max(0, low - margin), max: high + margin, axisLabel: { showMinLabel: false, showMaxLabel: false } };
  }

  function staircase() {
    const ordered = points.filter(({ kind }) => kind !== stairs.without).map(place).sort((one, two) => one[0] - two[0] || one[1] - two[1]);
    let best = Infinity;
    return ordered.map(([bytes, seconds]) => { best = Math.min(best, seconds); return [bytes, best]; });
  }

  const describe = ({ data }) => Memfit.tip(data.point.name, [
    ["transparent", figureName, Memfit.bytes(data.point.bytes)],
    ["transparent", "step", Memfit.seconds(data.point.seconds)],
    ["transparent", data.point.known, ""],
    ...(data.point.reason ? [["transparent", data.point.reason, ""]] : []),
  ]);

  function option() {
    const blue = Memfit.colour("--bar-planned");
    const isNear = mark && mark.bytes <= 1.6 * top;
    const line = { name: stairs.name, type: "line", step: "end", symbol: "none", silent: true, color: blue,
      lineStyle: { width: 1.2, opacity: 0.5 }, data: staircase(), emphasis: { disabled: true } };
    if (isNear) {
      line.markLine = { symbol: "none", silent: true, data: [{ xAxis: mark.bytes / unit.size }],
        lineStyle: { color: Memfit.colour("--ink"), type: "dashed" },
        label: { formatter: mark.label, color: Memfit.colour("--ink"), position: "end" } };
    }
    return {
      grid: { left: 66, right: 26, top: 48, bottom: 108 },
      legend: Memfit.legend(),
      tooltip: Memfit.tooltip({ trigger: "item", formatter: describe }),
      xAxis: Memfit.axis({ name: `${figureName} (${unit.name})`, nameLocation: "middle", nameGap: 26, ...wide(points.map(({ bytes }) => bytes / unit.size).concat(isNear ? [mark.bytes / unit.size] : [])) }),
      yAxis: Memfit.axis({ name: `step (${timeName})`, nameGap: 22, ...wide(points.map(({ seconds }) => seconds * scale)),
        nameTextStyle: { align: "left", color: Memfit.colour("--muted") } }),
      dataZoom: Memfit.zoom(),
      series: [line, ...kinds.map(marks).filter(({ data }) => data.length)],
    };
  }

  function open(id) {
    document.querySelectorAll("details.plan").forEach((details) => { details.open = details.id === id; });
    const opened = document.getElementById(id);
    if (opened) {
      opened.scrollIntoView({ block: "nearest" });
    }
  }

  return { option, ready: () => chart.on("click", ({ data }) => data && data.id && open(data.id)) };
});
