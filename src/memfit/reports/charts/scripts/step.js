"use strict";

// Bytes over the events of one step, stacked by category, with the total of another one on the same
// axis. Where the page knows who holds the bytes, a click or the arrow keys choose a moment.
Memfit.kind("step", ({ canvas, chart, content }) => {
  const { x, total, parts, phases, other, budget, last } = content;
  const highest = (values) => values.reduce((top, value) => Math.max(top, value), 0);
  const peak = total.indexOf(highest(total));
  const top = Math.max(highest(total), other ? highest(other.total) : 0, 1);
  const isBudgetNear = budget && budget <= 1.6 * top;
  const unit = Memfit.unitOf(top);
  let chosen = peak;

  // The last point at or before a place, which holds until the next one.
  function pointAt(places, place) {
    let low = 0;
    let high = places.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      [low, high] = places[middle] <= place ? [middle, high] : [low, middle - 1];
    }
    return low;
  }

  const nearest = (place) => {
    const point = pointAt(x, place);
    return point + 1 < x.length && x[point + 1] - place < place - x[point] ? point + 1 : point;
  };

  const phaseAt = (place) => {
    const phase = phases.find(({ begin, end }) => begin <= place && place < end);
    return phase ? `, ${phase.name}` : "";
  };

  function describe(place) {
    const point = pointAt(x, place);
    const rows = parts.filter(({ values }) => values[point]).map(
      ({ name, colour, values }) => [colour, name, Memfit.bytes(values[point])]);
    rows.reverse().unshift([Memfit.colour("--ink"), content.name, Memfit.bytes(total[point])]);
    if (other) {
      const there = other.total[pointAt(other.x, place)];
      rows.push([Memfit.colour("--accent"), other.name, Memfit.bytes(there)]);
    }
    return Memfit.tip(`event ${Memfit.grouped(Math.floor(place))}${phaseAt(place)}`, rows);
  }

  // Stairs drawn as such: a value holds until the next event. The library's own steps leave gaps
  // below areas.
  const points = (places, values) => places.flatMap((place, index) => {
    const value = values[index] / unit.size;
    return index ? [[place, values[index - 1] / unit.size], [place, value]] : [[place, value]];
  });

  // The areas lie on each other, the tallest sum behind: the library stacks one value per place.
  function areas() {
    const sums = x.map(() => 0);
    const stacked = parts.map(({ name, colour, values }) => {
      values.forEach((value, point) => { sums[point] += value; });
      return { name, colour, values: [...sums] };
    });
    return stacked.map(({ name, colour, values }, level) => ({
      name, type: "line", symbol: "none", color: colour, z: 3 - level / stacked.length, silent: true,
      data: points(x, values), lineStyle: { width: 0 }, areaStyle: { opacity: 1 }, emphasis: { disabled: true },
    }));
  }

  function marks() {
    const lines = [];
    if (content.lives) {
      lines.push({ xAxis: x[chosen], lineStyle: { color: Memfit.colour("--accent"), width: 1.5 },
        label: { show: false } });
    }
    if (isBudgetNear) {
      lines.push({ yAxis: budget / unit.size, lineStyle: { color: Memfit.colour("--ink"), type: "dashed" },
        label: { formatter: `budget ${Memfit.bytes(budget)}`, color: Memfit.colour("--ink"),
          position: 2 * x[peak] > last ? "insideStartTop" : "insideEndTop" } });
    }
    return { symbol: "none", silent: true, animation: false, data: lines };
  }

  function totalLine() {
    const ink = Memfit.colour("--ink");
    const shades = { backward: "--plot-backward", optimizer: "--plot-optimizer", setup: "--plot-setup" };
    return {
      name: content.name, type: "line", symbol: "none", color: ink, z: 4, silent: true,
      data: points(x, total), lineStyle: { width: 1.1 }, emphasis: { disabled: true },
      markLine: marks(),
      markPoint: { symbol: "circle", symbolSize: 8, silent: true, itemStyle: { color: ink },
        data: [{ coord: [x[peak], total[peak] / unit.size] }],
        label: { formatter: `peak ${Memfit.bytes(total[peak])}`, position: "top", color: ink, fontWeight: "bold" } },
      markArea: { silent: true, label: { color: Memfit.colour("--muted"), position: "insideTop" },
        data: phases.map(({ name, begin, end }) => [
          { name: (end - begin) / (last || 1) > 0.07 ? name : "", xAxis: begin,
            itemStyle: { color: Memfit.colour(shades[name] || "--surface"), opacity: 0.55 } },
          { xAxis: end }]) },
    };
  }

  const otherLine = () => ({
    name: other.name, type: "line", symbol: "none", color: Memfit.colour("--accent"), z: 5,
    data: points(other.x, other.total), lineStyle: { width: 2, type: [5, 3] }, silent: true,
    emphasis: { disabled: true },
  });

  function option() {
    return {
      grid: { left: 62, right: 18, top: 30, bottom: 108 },
      legend: Memfit.legend(),
      tooltip: Memfit.tooltip({ trigger: "axis", axisPointer: { snap: false },
        formatter: (items) => describe(items[0].axisValue) }),
      xAxis: Memfit.countAxis("allocations and frees", { min: 0, max: Math.max(1, last) }),
      yAxis: Memfit.axis({ type: "value", name: `allocated (${unit.name})`, nameGap: 12,
        nameTextStyle: { align: "left", color: Memfit.colour("--muted") },
        max: (1.24 * Math.max(top, isBudgetNear ? budget : 0)) / unit.size,
        axisLabel: { showMaxLabel: false } }),
      dataZoom: Memfit.zoom(),
      series: [...areas(), totalLine(), ...(other ? [otherLine()] : [])],
    };
  }

  function choose(point) {
    chosen = Math.max(0, Math.min(x.length - 1, point));
    chart.setOption({ series: [{ name: content.name, markLine: marks() }] });
    Memfit.choose(chosen);
  }

  function ready() {
    chart.getZr().on("click", ({ offsetX, offsetY }) => {
      if (chart.containPixel("grid", [offsetX, offsetY])) {
        choose(nearest(chart.convertFromPixel({ xAxisIndex: 0 }, offsetX)));
      }
    });
    canvas.tabIndex = 0;
    canvas.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: x.length - 1, Enter: peak };
      if (event.key in keys) {
        event.preventDefault();
        choose(keys[event.key]);
      }
    });
  }

  return { option, ready: content.lives ? ready : undefined };
});
