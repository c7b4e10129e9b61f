/** Builds elements. Text only ever becomes text nodes: nothing that a sample, a scorer or a run's name says is HTML. */

/**
 * @param {string} tag
 * @param {Object} [attributes] `style` is an object of properties, `on` one of listeners; null and false leave out
 * @param {...(Node|string|number|null|Array)} children
 */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [property, each] of Object.entries(value)) node.style.setProperty(property, each);
    else if (name === "on") for (const [event, each] of Object.entries(value)) node.addEventListener(event, each);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** A small square in the colour of what it stands before. */
export function swatch(color) {
  return element("i", { class: "swatch", style: { background: `var(${color})` } });
}

/**
 * A table that scrolls sideways in its own frame where the screen is narrow.
 *
 * @param {string} caption read to those who do not see the heading above
 * @param {{label: string, number?: boolean, cell: function(Object): (Node|string)}[]} columns the first heads its row; `wide`
 *     ones are left out on a phone
 * @param {Object[]} rows
 * @param {string} [look] a class of style.css
 */
export function table(caption, columns, rows, look = null) {
  const side = (column) => [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ") || null;
  const heads = columns.map((column) => element("th", { scope: "col", class: side(column) }, column.label));
  const body = rows.map((row) =>
    element("tr", {}, columns.map((column, index) =>
      element(index ? "td" : "th", { class: side(column), scope: index ? null : "row" }, column.cell(row)))),
  );
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", { class: look }, element("caption", { class: "hidden" }, caption),
      element("thead", {}, element("tr", {}, heads)), element("tbody", {}, body)),
  );
}

/** Puts other content into a place; a table's frame stays, and with it the focus and how far it was scrolled. */
export function renew(host, content) {
  const frame = host.querySelector(":scope > .scroll");
  if (frame !== null && content.matches(".scroll")) frame.replaceChildren(...content.childNodes);
  else host.replaceChildren(content);
}

/** Something that opens; what is in it is built when it is opened. */
export function details(summary, build) {
  const inside = element("div");
  const node = element("details", {}, element("summary", {}, summary), inside);
  const fill = () => {
    if (node.open) renew(inside, build());
  };
  node.addEventListener("toggle", fill);
  return { node, refresh: fill };
}

/** Tells those who listen to the page. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
