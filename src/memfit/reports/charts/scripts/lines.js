"use strict";

// Lines over the steps or epochs of a run, in panels one above the other that share their axis.
Memfit.kind("lines", ({ canvas, chart, content }) => {
  const { along, panels, events } = content;
  const HEIGHTS = panels.map(({ weight }) => weight);
  const tops = [];
  const room = { top: 34, between: 58, bottom: 112 };
  const inner = 190 * HEIGHTS.reduce((sum, weight) => sum + weight, 0);
  canvas.style.height = `${inner + room.top + room.bottom + room.between * (panels.length - 1)}px`;
  chart.resize();
  HEIGHTS.reduce((top, weight) => { tops.push(top); return top + 190 * weight + room.between; }, room.top);

  const highest = ({ lines, budget }) => lines.reduce(
    (top, { y }) => y.reduce((most, value) => Math.max(most, value ?? 0), top), budget || 0);
  const units = panels.map((panel) => (panel.is_bytes ? Memfit.unitOf(highest(panel)) : { size: 1, name: "" }));
  const written = (panel, value) => (panels[panel].is_bytes ? Memfit.bytes(value) : Number(value.toPrecision(4)).toString());

  function line(panel, { name, colour, x, y, style }) {
    const widths = { band: 6, dotted: 1.6, solid: 1.8 };
    return {
      name, type: "line", xAxisIndex: panel, yAxisIndex: panel, color: colour, connectNulls: false,
      step: style === "band" ? "end" : false,
      symbol: style !== "band" && x.length <= 40 ? "circle" : "none", symbolSize: 5,
      lineStyle: { width: widths[style], type: style === "dotted" ? [5, 2] : "solid", opacity: style === "band" ? 0.45 : 1 },
      data: x.map((place, index) => [place, y[index] === null ? null : y[index] / units[panel].size]),
      emphasis: { disabled: true },
    };
  }

  function budgetLine(panel, budget) {
    return { symbol: "none", silent: true, data: [{ yAxis: budget / units[panel].size }],
      lineStyle: { color: Memfit.colour("--ink"), type: "dashed" },
      label: { formatter: `budget ${Memfit.bytes(budget)}`, position: "insideEndTop", color: Memfit.colour("--ink") } };
  }

  // What happened: a shape at the top of the first panel and a thin line below it.
  const marks = ({ name, colour, symbol, steps, count }) => ({
    name: `${name} (${Memfit.grouped(count)})`, type: "scatter", xAxisIndex: 0, yAxisIndex: 0, color: colour, symbol,
    symbolSize: 12, z: 6, data: steps.map((step) => [step, 0.97 * maximum(0)]),
    markLine: { symbol: "none", silent: true, label: { show: false }, lineStyle: { color: colour, type: "solid", opacity: 0.5 },
      data: steps.length <= 40 ? steps.map((step) => ({ xAxis: step })) : [] },
  });

  const maximum = (panel) => (1.15 * Math.max(highest(panels[panel]), panels[panel].is_bytes ? 1 : 0)) / units[panel].size;

  function describe(items) {
    const rows = items.filter(({ value }) => value[1] !== null && value[1] !== undefined).map(
      ({ color, seriesName, value, axisIndex, seriesType }) => [color, seriesName,
        seriesType === "scatter" ? "" : written(axisIndex || 0, value[1] * units[axisIndex || 0].size)]);
    return Memfit.tip(`${along} ${Memfit.grouped(items[0].axisValue)}`, rows);
  }

  function option() {
    const places = panels.flatMap(({ lines }) => lines.flatMap(({ x }) => x)).concat(events.flatMap(({ steps }) => steps));
    const ends = places.reduce(([low, high], place) => [Math.min(low, place), Math.max(high, place)], [Infinity, -Infinity]);
    const margin = Math.max(0.5, 0.015 * (ends[1] - ends[0]));
    const range = places.length ? { min: ends[0] - margin, max: ends[1] + margin } : {};
    const all = panels.map((_, panel) => panel);
    return {
      title: panels.map(({ title }, panel) => ({ text: units[panel].name ? `${title} (${units[panel].name})` : title, left: 8, top: tops[panel] - 30,
        textStyle: { fontSize: 13, fontWeight: 500, color: Memfit.colour("--ink") } })),
      grid: panels.map(({ weight }, panel) => ({ left: 62, right: 18, top: tops[panel], height: 190 * weight - 4 })),
      legend: Memfit.legend(),
      tooltip: Memfit.tooltip({ trigger: "axis", formatter: describe }),
      axisPointer: { link: [{ xAxisIndex: "all" }] },
      xAxis: panels.map((_, panel) => Memfit.countAxis(panel === panels.length - 1 ? along : "", { gridIndex: panel, ...range })),
      yAxis: panels.map(({ is_bytes: isBytes }, panel) => Memfit.axis({ type: "value", gridIndex: panel,
        scale: !isBytes, ...(isBytes ? { min: 0, max: maximum(panel) } : {}),
        axisLabel: { showMaxLabel: false } })),
      dataZoom: Memfit.zoom(all),
      series: [...panels.flatMap(({ lines, budget }, panel) => lines.map((each, index) => (
        { ...line(panel, each), ...(budget && !index ? { markLine: budgetLine(panel, budget) } : {}) }))), ...events.map(marks)],
    };
  }

  return { option };
});
