// Not a module, so that it runs before the first paint: a chosen theme must not flash up in the other one.
(() => {
  const root = document.documentElement;
  const set = (theme) => { root.style.colorScheme = theme || ""; root.dataset.theme = theme || ""; };
  const read = () => { try { return localStorage.getItem("adlm-theme"); } catch { return null; } };
  set(read());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const dark = () => root.dataset.theme === "dark"
      || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    const label = () => {
      button.textContent = dark() ? "Light" : "Dark";
      button.setAttribute("aria-label", dark() ? "Switch to the light theme" : "Switch to the dark theme");
    };
    button.addEventListener("click", () => {
      const theme = dark() ? "light" : "dark";
      set(theme);
      try { localStorage.setItem("adlm-theme", theme); } catch { /* a private window may refuse: lasts until reload */ }
      label();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
    label();
  });
})();
