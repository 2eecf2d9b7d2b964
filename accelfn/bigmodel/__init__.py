"""Models that don't fit: a plan of where every tensor lies, loading, offloading, and running."""

from accelfn.bigmodel.pipeline.pippy import prepare_pippy
from accelfn.bigmodel.pipeline.plan import PipelinePlan, StagePlan
from accelfn.bigmodel.pipeline.prepare import plan_pipeline, prepare_pipeline
from accelfn.bigmodel.pipeline.run import Pipeline
from accelfn.bigmodel.places import Place, PlaceLike

__all__ = (
    "Pipeline",
    "PipelinePlan",
    "Place",
    "PlaceLike",
    "StagePlan",
    "plan_pipeline",
    "prepare_pipeline",
    "prepare_pippy",
)
