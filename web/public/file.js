// Opened from disk, a browser refuses the page's modules and files: say what to do instead of loading for ever.
if (location.protocol === "file:") {
  document.getElementById("notice-title").textContent = "This page needs a web server";
  document.getElementById("notice-text").textContent =
    "Opened from disk it cannot load its files.\nStart it with drivetrain play; a site made by --out is served by any web server, such as python3 -m http.server.";
  document.getElementById("notice").className = "trouble";
  document.getElementById("progress").hidden = true;
}
