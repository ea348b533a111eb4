/* Small services to every page: what scrolls sideways can be reached by keyboard, what is folded is printed.
   SPDX-License-Identifier: MIT */
(function () {
  "use strict";
  // The theme's controls, made known to keyboards and screen readers.
  function name_controls() {
    const dialog = document.querySelector(".md-search[role=dialog]");
    if (dialog) dialog.setAttribute("aria-label", "Search");
    document.querySelectorAll("nav.md-code__nav").forEach((nav) => nav.setAttribute("role", "none"));
    for (const [id, name] of [["__drawer", "Menu"], ["__search", "Search"]]) {
      const label = document.querySelector(`header label.md-header__button[for=${id}]`);
      if (!label || label.tabIndex === 0) continue;
      label.tabIndex = 0;
      label.setAttribute("role", "button");
      label.setAttribute("aria-label", name);
      label.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        label.click();
      });
    }
  }

  const scrollers = ".math, .chart-scroll, .md-typeset__scrollwrap, .table-scroll, .widget, figure.output pre, pre > code";

  function reach() {
    document.querySelectorAll(".table-scroll[role=region]").forEach((one) => one.setAttribute("role", "group"));
    document.querySelectorAll(scrollers).forEach((element) => {
      if (element.scrollWidth > element.clientWidth + 1) {
        if (!element.hasAttribute("tabindex")) element.tabIndex = 0;
        if (!element.matches("code") && !element.hasAttribute("role")) {
          element.setAttribute("role", "group");
          element.setAttribute("aria-label", "scrolls sideways");
        }
      }
    });
  }

  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("article details:not([open])")].filter((one) => !one.closest("form.predict:not(.committed)"));
    folded.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => { folded.forEach((one) => { one.open = false; }); });
  addEventListener("resize", reach);
  document.addEventListener("toggle", reach, true);
  if (typeof document$ !== "undefined") document$.subscribe(() => { name_controls(); reach(); });
  else name_controls();
  addEventListener("load", () => { name_controls(); reach(); });
})();
