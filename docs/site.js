// For those who hear a page or read it by the keyboard: each bar of buttons on a block of code has a
// name of its own, and a block or a table that is wider than its place can be reached and scrolled.
const mend = () => {
  document.querySelectorAll(".md-code__nav").forEach((bar, place) => {
    bar.setAttribute("aria-label", `Code block ${place + 1}`);
  });
  document.querySelectorAll("pre, pre > code, .md-typeset__scrollwrap").forEach((box) => {
    if (box.scrollWidth > box.clientWidth && !box.hasAttribute("tabindex")) box.tabIndex = 0;
  });
};
const changes = { childList: true, subtree: true, attributes: true, attributeFilter: ["tabindex"] };
new MutationObserver(mend).observe(document.body, changes);
addEventListener("resize", mend);
mend();
