// The system's theme first, then whatever the reader chooses.
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
setTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => { if (!chosen) setTheme(dark.matches ? "dark" : "light"); });
byId("theme").addEventListener("click", () => {
  chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(chosen);
});
startDistribution();
startLayers();
startConvergence();
startSensitivity();
startBudget();
startExperts();
startTable();
drawAll();
document.documentElement.dataset.ready = "true";
