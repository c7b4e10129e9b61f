/** The switch between light and dark: "auto" follows the system. The choice is kept in the browser. */

const KEY = "plaudit-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

/** Calls back whenever the colours on the screen change, until the function that it returns is called. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function startTheme() {
  const chosen = remembered();
  for (const input of document.querySelectorAll("#theme input")) {
    input.checked = input.value === chosen;
    input.addEventListener("change", () => choose(input.value));
  }
  apply(chosen);
  system.addEventListener("change", tell);
}

function choose(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // a browser that keeps nothing still switches
  }
  apply(theme);
  tell();
}

function apply(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

function tell() {
  for (const listener of listeners) listener();
}

function remembered() {
  try {
    return localStorage.getItem(KEY) ?? "auto";
  } catch {
    return "auto";
  }
}
