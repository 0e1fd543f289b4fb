"""Ray's nodes without the parts of its dashboard.

A busy machine may not start their agent within the 15 seconds that Ray gives it.
"""

from ray._private import utils
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

utils.get_dashboard_dependency_error = lambda: ImportError("left out")


class LightNodes(FakeMultiNodeProvider):
    """The provider of `fake_autoscaler.py`, in Ray's monitor. The head imports this file too."""
