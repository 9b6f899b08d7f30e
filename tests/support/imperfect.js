// What keyboards, screen readers and weak eyes would stumble over in a page, one line each.
() => {
  const found = [];
  const shown = (e) => e.outerHTML.slice(0, 120);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const said = (e) => (e.getAttribute("aria-label") || e.textContent || e.value || "").trim();

  if (document.documentElement.lang !== "en") found.push("no language");
  if (all("main").length !== 1) found.push("not one main");
  if (all("h1").length !== 1) found.push("not one h1");
  let level = 0;
  for (const e of all("h1, h2, h3, h4")) {
    if (Number(e.tagName[1]) > level + 1) found.push(`a level left out before ${shown(e)}`);
    level = Number(e.tagName[1]);
  }
  for (const e of all("input:not([type=hidden]), select, progress"))
    if (!e.labels.length && !e.ariaLabel) found.push(`no label: ${shown(e)}`);
  for (const e of all("a, button, summary")) if (!said(e)) found.push(`no text: ${shown(e)}`);
  for (const e of all("img:not([alt]), svg:not([aria-label])")) found.push(`no text: ${shown(e)}`);
  for (const e of all("svg[role=img] a")) found.push(`a link in an image: ${shown(e)}`);
  for (const e of all("table"))
    if (!e.querySelector("thead th[scope=col]")) found.push("a table without headers");
  for (const e of all("th")) if (!e.scope) found.push(`a header of nothing: ${shown(e)}`);
  for (const e of all("[role=region], nav"))
    if (!e.ariaLabel && !e.hasAttribute("aria-labelledby")) found.push(`no name: ${shown(e)}`);
  for (const e of all("[aria-describedby], [aria-labelledby]"))
    for (const name of ["aria-describedby", "aria-labelledby"])
      for (const id of (e.getAttribute(name) || "").split(" ").filter(Boolean))
        if (!document.getElementById(id)) found.push(`no #${id} for ${shown(e)}`);
  for (const e of all("a[href^='#']"))
    if (!document.getElementById(e.hash.slice(1))) found.push(`leads nowhere: ${shown(e)}`);
  const ids = all("[id]").map((e) => e.id);
  for (const id of new Set(ids))
    if (ids.filter((other) => other === id).length > 1) found.push(`twice: #${id}`);
  for (const e of all("[style], [onclick], style, script:not([src])"))
    found.push(`inline: ${shown(e)}`);

  // Contrast as WCAG 2 defines it: 4.5, or 3 for large text.
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (colour) => {
    if (!known.has(colour)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
      known.set(colour, [...pen.getImageData(0, 0, 1, 1).data].map((v) => v / 255));
    }
    return known.get(colour);
  };
  const over = (top, under) =>
    [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]));
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const grounds = new Map([[null, [1, 1, 1]]]);
  const behind = (e) => {
    if (!grounds.has(e))
      grounds.set(e, over(rgba(getComputedStyle(e).backgroundColor), behind(e.parentElement)));
    return grounds.get(e);
  };
  for (const e of all("body *")) {
    const words = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!words || !e.checkVisibility() || e.closest("title, noscript, datalist")) continue;
    const style = getComputedStyle(e);
    const drawn = e instanceof SVGElement;
    const cell = drawn && e.closest(".cell");
    const ground = cell ? rgba(getComputedStyle(cell.querySelector("rect")).fill) : behind(e);
    const ink = over(rgba(drawn ? style.fill : style.color), ground);
    const [high, low] = [light(ink), light(ground)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (large ? 3 : 4.5)) found.push(`contrast ${ratio.toFixed(2)}: ${shown(e)}`);
  }
  return found;
}
