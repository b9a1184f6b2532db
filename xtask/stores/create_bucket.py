"""Creates a bucket (S3) or a container (Azure): create_bucket.py s3|az ENDPOINT NAME, credentials as in the environment.

object_store creates none. Version 2 of Amazon's signature and Azure's shared key are one HMAC each.
"""

import base64
import hashlib
import hmac
import os
import sys
import urllib.parse
import urllib.request
from email.utils import formatdate


def signature(key: bytes, text: str, digest) -> str:
    return base64.b64encode(hmac.new(key, text.encode(), digest).digest()).decode()


def s3(endpoint: str, name: str) -> urllib.request.Request:
    date = formatdate(usegmt=True)
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    signed = signature(secret, f"PUT\n\n\n{date}\n/{name}", hashlib.sha1)
    headers = {"Date": date, "Authorization": f"AWS {os.environ['AWS_ACCESS_KEY_ID']}:{signed}"}
    return urllib.request.Request(f"{endpoint}/{name}", method="PUT", headers=headers)


def az(endpoint: str, name: str) -> urllib.request.Request:
    account = os.environ["AZURE_STORAGE_ACCOUNT_NAME"]
    key = base64.b64decode(os.environ["AZURE_STORAGE_ACCOUNT_KEY"])
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *[f"{header}:{value}" for header, value in headers.items()]]
    # The endpoint's path begins with the account, and the resource is the account and that path.
    path = f"{urllib.parse.urlparse(endpoint).path}/{name}"
    signed = signature(key, "\n".join([*lines, f"/{account}{path}", "restype:container"]), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {account}:{signed}"
    return urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)


kind, endpoint, name = sys.argv[1:]
with urllib.request.urlopen({"s3": s3, "az": az}[kind](endpoint, name), timeout=30) as response:
    print(response.status, endpoint, name)
