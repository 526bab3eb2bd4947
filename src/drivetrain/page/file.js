// If the page is opened from disk, browsers refuse to load its modules and files. Shows what to do, instead of loading for ever.
if (location.protocol === "file:") {
  document.getElementById("notice-title").textContent = "This page needs a web server";
  document.getElementById("notice-text").textContent =
    "Opened from disk it cannot load its files.\nStart it with drivetrain play. For a site made by --out use any web server, such as python3 -m http.server.";
  document.getElementById("notice").className = "trouble";
  document.getElementById("progress").hidden = true;
}
