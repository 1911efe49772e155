# SPDX-License-Identifier: Apache-2.0
"""Pages that dpjax writes, read back: every one of them is XML too."""

import xml.etree.ElementTree as ET


def parsed(path):
    """The page as XML, without the namespace of HTML or SVG."""
    tree = ET.fromstring(path.read_text(encoding="utf-8"))
    for node in tree.iter():
        node.tag = node.tag.rpartition("}")[2]
    return tree


def text(node):
    """All its words."""
    return " ".join("".join(node.itertext()).split())
