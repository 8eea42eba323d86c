"use strict";

// The same figures of several ranks as bars side by side.
Memfit.kind("bars", ({ chart, content }) => {
  const { along, names, bars } = content;
  const top = bars.reduce((most, { values }) => values.reduce((more, value) => Math.max(more, value ?? 0), most), 1);
  const unit = Memfit.unitOf(top);

  const describe = (items) => Memfit.tip(`${along} ${items[0].name}`, items.map(
    ({ color, seriesName, dataIndex, seriesIndex }) => {
      const value = bars[seriesIndex].values[dataIndex];
      return [color, seriesName, value === null ? "not measured" : Memfit.bytes(value)];
    }));

  const option = () => ({
    grid: { left: 62, right: 18, top: 34, bottom: 108 },
    legend: Memfit.legend(),
    tooltip: Memfit.tooltip({ trigger: "axis", axisPointer: { type: "shadow" }, formatter: describe }),
    xAxis: Memfit.axis({ type: "category", data: names, name: along, nameLocation: "middle", nameGap: 26 }),
    yAxis: Memfit.axis({ type: "value", name: `highest (${unit.name})`,
      nameTextStyle: { align: "left", color: Memfit.colour("--muted") } }),
    dataZoom: Memfit.zoom(),
    series: bars.map(({ name, colour, values }) => ({
      name, type: "bar", color: colour, emphasis: { disabled: true },
      data: values.map((value) => (value === null ? null : value / unit.size)) })),
  });

  return { option };
});
