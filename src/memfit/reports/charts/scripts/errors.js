"use strict";

// How far each parameter is off: a point per parameter on a logarithmic axis, in the order of the
// model, with the bound up to which a plan counts as exact.
Memfit.kind("errors", ({ content }) => {
  const { names, plans, bound, floor } = content;
  const shown = (value) => Math.max(value, floor);
  const described = ({ seriesName, data }) => Memfit.tip(names[data[0]],
    [["transparent", seriesName, data[2] ? data[2].toExponential(1) : "0"]]);

  function option() {
    const series = plans.map(({ name, errors, colour }) => ({
      name, type: "scatter", symbolSize: 8, color: colour,
      data: errors.map((value, index) => [index, shown(value), value]).filter(([, value]) => value !== null),
    }));
    if (series.length && bound) {
      series[0].markLine = { symbol: "none", silent: true, data: [{ yAxis: bound }],
        lineStyle: { color: Memfit.colour("--bad"), type: "dashed" },
        label: { formatter: `bound ${bound.toExponential(0)}`, color: Memfit.colour("--bad"), position: "insideEndTop" } };
    }
    return {
      grid: { left: 66, right: 22, top: 30, bottom: 108 },
      legend: Memfit.legend(),
      tooltip: Memfit.tooltip({ trigger: "item", formatter: described }),
      xAxis: Memfit.countAxis("parameters, in the model's order", { min: -0.5, max: names.length - 0.5,
        axisLabel: { formatter: (value) => (Number.isInteger(value) ? Memfit.grouped(value + 1) : "") } }),
      yAxis: Memfit.axis({ type: "log", name: "relative error", min: floor, axisLabel: { formatter: (value) => value.toExponential(0) },
        nameTextStyle: { align: "left", color: Memfit.colour("--muted") } }),
      dataZoom: Memfit.zoom(),
      series,
    };
  }

  return { option };
});

// A table whose headings sort it: a cell's `data-value` is what counts, or its text.
function makeSortable(table) {
  const body = table.tBodies[0];
  const valueOf = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const compared = (one, two) => {
    const [first, second] = [Number(one), Number(two)];
    return Number.isNaN(first) || Number.isNaN(second) ? one.localeCompare(two) : first - second;
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = Memfit.element("button", { type: "button", class: "sort" }, ...head.childNodes);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      [...table.tHead.rows[0].cells].forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
      const rows = [...body.rows].sort((one, two) => sign * compared(valueOf(one, column), valueOf(two, column)));
      body.append(...rows);
    });
  });
}

document.querySelectorAll("table.sortable").forEach(makeSortable);
Memfit.start();
