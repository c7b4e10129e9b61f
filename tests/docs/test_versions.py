"""One place says the version: ``plaudit_wire.VERSION``. What cannot read it there says the same."""

from __future__ import annotations

import re

import pages
import yaml

from plaudit_wire import VERSION


def test_chart_images_pages_and_citation_name_the_version():
    chart = yaml.safe_load((pages.ROOT / "charts/plaudit/Chart.yaml").read_text())
    values = yaml.safe_load((pages.ROOT / "charts/plaudit/values.yaml").read_text())
    tags = {image.rpartition(":")[2] for image in values["images"].values() if str(image).startswith("plaudit-")}
    citation = yaml.safe_load((pages.ROOT / "CITATION.cff").read_text())["version"]
    tag = re.compile(r"(?:TAG=|plaudit-(?:operator|worker|gpu):)(\d[\w.]*)")
    named = {found for page in pages.PAGES for found in tag.findall(pages.text(page))}
    assert {chart["version"], chart["appVersion"], citation} | tags | named == {VERSION}
