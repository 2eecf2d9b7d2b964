"""Start a planned job on Amazon SageMaker with the sagemaker package, and wait for it."""

from __future__ import annotations

import importlib
from typing import Any

from accelfn.errors import MissingExtraError
from accelfn.launch.plan.sagemaker import SagemakerPlan


def run_sagemaker(plan: SagemakerPlan) -> str:
    """Start the job, show its log until it ends, and return the location of its model.

    Effect: uploads the script's folder, and costs money.

    Raises:
        MissingExtraError: The sagemaker package isn't installed, or is a version without estimators.
        Exception: Raised by AWS, for example without credentials, or if the job fails.
    """
    try:
        boto3: Any = importlib.import_module("boto3")
        sagemaker: Any = importlib.import_module("sagemaker")
        estimators: Any = importlib.import_module("sagemaker.huggingface")
    except ImportError as error:
        raise MissingExtraError(
            "compute_environment AMAZON_SAGEMAKER needs the sagemaker package, of a version before 3: "
            f"{error}. Run: pip install 'accelfn[sagemaker]'"
        ) from error
    session = sagemaker.Session(
        boto_session=boto3.Session(profile_name=plan.profile, region_name=plan.region)
    )
    estimator = estimators.HuggingFace(**plan.estimator, sagemaker_session=session)
    estimator.fit(inputs=dict(plan.inputs) or None)
    return str(estimator.model_data)
