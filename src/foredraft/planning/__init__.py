"""How much to draft: measured costs, tracked acceptance, and the shape that makes the most of both.

``costs`` says what a round takes, ``acceptance`` what comes out of it; ``search`` finds the best shape between them and ``batches`` the
best depth for each row; ``forecasts`` puts them together, ``planner`` decides round by round, and ``profiles`` keeps what was measured
between runs.
"""

from foredraft.planning.acceptance import Acceptance
from foredraft.planning.costs import CostModel
from foredraft.planning.largest import AUTO
from foredraft.planning.making import make_planner
from foredraft.planning.planner import AutomaticPlanner
from foredraft.planning.rounds import FixedPlanner, Planner, Round

__all__ = ["AUTO", "Acceptance", "AutomaticPlanner", "CostModel", "FixedPlanner", "Planner", "Round", "make_planner"]
