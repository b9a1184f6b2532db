"""A hook of slime that publishes each version, and engines elsewhere follow: beside slime's other flags

PYTHONPATH=python/examples … --update-weight-transport disk --update-weight-disk-dir /shared/weights
--custom-update-weight-post-write-path publish_from_slime.hook --custom-config-path driftless.yaml

where driftless.yaml has the lines `driftless_store: s3://bucket/weights` and `driftless_run: my-run`. Without a line of
your own, `driftless_rl.slime.publish` is the hook.
"""

import driftless_rl.slime


def hook(args, version_dir, rollout_engines):
    published = driftless_rl.slime.publish(args, version_dir, rollout_engines)
    if published is not None:
        print(f"version {published.version}: {published.publication_bytes} of {published.full_bytes} bytes")
