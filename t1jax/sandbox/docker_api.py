"""What the Docker SDK's client does not offer: answers that are read as they come, and closed in any case."""

import contextlib
from collections.abc import Iterator

import docker
import requests


@contextlib.contextmanager
def streamed(
    api: docker.APIClient, method: str, path: str, **options
) -> Iterator[requests.Response]:
    """The answer to a request, whose body is for the caller. `options` as in requests.

    Raises docker.errors.APIError where the daemon refuses.
    """
    url = f"{api.base_url}/v{api.api_version}{path}"
    with api.request(method, url, stream=True, **options) as reply:
        try:
            reply.raise_for_status()
        except requests.HTTPError as error:
            docker.errors.create_api_error_from_http_exception(error)
        yield reply
