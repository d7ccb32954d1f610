// Before the first paint: the theme that was chosen here, if one was (`appearance.js` keeps it).
try {
  const theme = JSON.parse(localStorage.getItem("llmserve.theme"));
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // a browser that keeps nothing
}
