"use strict";

// What all charts of a page share: their data, words for figures, and the place they are drawn in.
// Names come from outside. They are only ever set as text, never as markup.
const Memfit = (() => {
  const contents = JSON.parse(document.getElementById("page-data").textContent);
  const kinds = {};
  const listeners = [];
  const UNITS = [[2 ** 30, "GiB", 2], [2 ** 20, "MiB", 1], [2 ** 10, "KiB", 1], [1, "B", 0]];
  const isDark = window.matchMedia("(prefers-color-scheme: dark)");

  const grouped = (value, digits = 0) => value.toLocaleString(
    "en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  function unitOf(bytes) {
    const [size, name, digits] = UNITS.find(([size]) => Math.abs(bytes) >= size) || UNITS.at(-1);
    return { size, name, digits };
  }

  // As `format_bytes` writes them in the rest of the page.
  function bytes(value) {
    const size = Math.abs(value) >= 2 ** 20 / 10 && Math.abs(value) < 2 ** 20 ? 2 ** 20 : value;
    const unit = unitOf(size);
    return `${grouped(value / unit.size, unit.digits)} ${unit.name}`;
  }

  function seconds(value) {
    if (value >= 59.95) {
      const whole = Math.round(value);
      return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
    }
    const [scale, name] = value >= 0.9995 ? [1, "s"] : value >= 0.9995e-3 ? [1e3, "ms"] : [1e6, "us"];
    return `${Number((value * scale).toPrecision(3))} ${name}`;
  }

  const share = (part, whole) => (whole ? `${grouped((100 * part) / whole, 1)} %` : "-");

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...children);
    return made;
  }

  // Rows of a tooltip: what it is of, then a swatch, a name and a value each.
  function tip(heading, rows) {
    const body = rows.map(([colour, name, value]) => element("tr", {},
      element("td", {}, element("i", { class: "swatch", style: `background: ${colour}` }), name),
      element("td", { class: "number" }, value)));
    return element("div", { class: "tip" }, element("b", {}, heading), element("table", {}, ...body));
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function shared() {
    const ink = colour("--ink");
    return {
      animation: false,
      aria: { enabled: true },
      backgroundColor: "transparent",
      textStyle: { color: ink, fontFamily: getComputedStyle(document.body).fontFamily },
    };
  }

  const tooltip = (more) => ({
    confine: true,
    backgroundColor: colour("--surface"),
    borderColor: colour("--line"),
    textStyle: { color: colour("--ink"), fontSize: 13 },
    ...more,
  });

  const axis = (more) => ({
    nameTextStyle: { color: colour("--muted") },
    axisLabel: { color: colour("--muted"), hideOverlap: true, ...(more.axisLabel || {}) },
    axisLine: { lineStyle: { color: colour("--line") } },
    axisTick: { show: false },
    splitLine: { show: more.type !== "category" && !more.isAlong, lineStyle: { color: colour("--line") } },
    ...Object.fromEntries(Object.entries(more).filter(([name]) => !["axisLabel", "isAlong"].includes(name))),
  });

  // The count of something along the bottom: whole numbers alone.
  const countAxis = (name, more) => axis({
    type: "value",
    isAlong: true,
    name,
    nameLocation: "middle",
    nameGap: 26,
    minInterval: 1,
    axisLabel: { formatter: (value) => (Number.isInteger(value) ? grouped(value) : "") },
    ...more,
  });

  const zoom = (axes = [0]) => [
    { type: "slider", xAxisIndex: axes, height: 22, bottom: 34, filterMode: "none", showDetail: false,
      borderColor: colour("--line"), textStyle: { color: colour("--muted") } },
    { type: "inside", xAxisIndex: axes, filterMode: "none", zoomOnMouseWheel: "ctrl",
      moveOnMouseMove: false, moveOnMouseWheel: "shift" },
  ];

  const legend = (more) => ({
    type: "scroll",
    bottom: 0,
    icon: "roundRect",
    itemWidth: 12,
    itemHeight: 10,
    textStyle: { color: colour("--ink") },
    pageTextStyle: { color: colour("--muted") },
    pageIconColor: colour("--accent"),
    ...more,
  });

  // Draws one figure in place of its picture, which comes back if that fails.
  function mount(figure) {
    const content = contents[figure.dataset.content];
    const make = kinds[figure.dataset.chart];
    if (!content || !make) {
      return;
    }
    const canvas = element("div", { class: "canvas", role: "img" });
    figure.append(canvas);
    figure.classList.add("live");
    try {
      const chart = echarts.init(canvas);
      const view = make({ figure, canvas, chart, content });
      const draw = () => {
        const zooms = (chart.getOption() || {}).dataZoom;
        chart.setOption({ ...shared(), ...view.option() }, { notMerge: true });
        if (zooms && zooms.length) {
          chart.dispatchAction({ type: "dataZoom", start: zooms[0].start, end: zooms[0].end });
        }
      };
      draw();
      if (view.ready) {
        view.ready(draw);
      }
      isDark.addEventListener("change", draw);
      new ResizeObserver(() => chart.resize()).observe(canvas);
    } catch (error) {
      figure.classList.remove("live");
      canvas.remove();
      console.error(error);
    }
  }

  return {
    axis, bytes, colour, contents, countAxis, element, grouped, legend, seconds, share, tip, tooltip,
    unitOf, zoom,
    kind: (name, make) => { kinds[name] = make; },
    // A moment of the step was chosen: the index of a point of the chart.
    choose: (point) => listeners.forEach((listener) => listener(point)),
    onChoice: (listener) => listeners.push(listener),
    start: () => {
      document.querySelectorAll(".scripted").forEach((element) => { element.hidden = false; });
      document.querySelectorAll("figure[data-chart]").forEach(mount);
    },
  };
})();
