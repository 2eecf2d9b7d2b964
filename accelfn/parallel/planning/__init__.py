"""What training a model on ranks would take of each: memory, traffic, and the meshes in which it fits."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from accelfn.parallel.planning.costs import Exchange as Exchange
from accelfn.parallel.planning.memory import Budget as Budget, plan_memory as plan_memory
from accelfn.parallel.planning.search import (
    Layout as Layout,
    MeshSearch as MeshSearch,
    RefusedMesh as RefusedMesh,
    search_meshes as search_meshes,
)
from accelfn.parallel.planning.traffic import Traffic as Traffic, plan_traffic as plan_traffic
