# SPDX-License-Identifier: Apache-2.0
"""Writes the files above the versions of the site: `python docs/site_root.py build/docs`.

Each version of the site lies in a folder of its own, `build/docs/0.2.0`. Versions that already lie
there stay, so publishing is: copy the published site to `build/docs`, `make docs`, publish
`build/docs`. The menu of versions reads `versions.json`. A server shows `404.html` for each address
that does not exist.
"""

import json
import pathlib
import re
import shutil
import sys

REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>dpjax</title>
<link rel="icon" href="{version}/assets/images/favicon.png">
<link rel="canonical" href="{site}{version}/">
<meta http-equiv="refresh" content="0; url={version}/index.html">
<p><a href="{version}/index.html">dpjax {version}</a></p>
</html>
"""


def versions_in(folder):
    """The versions of the site in a folder, the newest first."""
    names = [path.parent.name for path in folder.glob("*/objects.inv")]
    return sorted(names, key=lambda name: list(map(int, re.findall(r"\d+", name))), reverse=True)


def main(folder):
    """Writes the list of versions, and what leads to the newest one."""
    versions = versions_in(folder)
    newest = versions[0]
    listed = [{"version": name, "title": name, "aliases": []} for name in versions]
    (folder / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    for name in ("404.html", "sitemap.xml"):
        shutil.copy(folder / newest / name, folder / name)
    sitemap = (folder / "sitemap.xml").read_text()
    site, _, _ = re.search("<loc>(.*?)</loc>", sitemap)[1].partition(f"{newest}/")
    (folder / "index.html").write_text(REDIRECT.format(site=site, version=newest))
    (folder / "robots.txt").write_text(f"User-agent: *\nSitemap: {site}sitemap.xml\n")
    # GitHub Pages otherwise leaves out files whose names begin with an underscore.
    (folder / ".nojekyll").touch()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
