"""Turns the failures of stores into one line that names the fix, and tells which of them pass."""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

from drivetrain.buckets.url import BucketUrl
from drivetrain.outcomes import Outcome, Problem
from drivetrain.terminal import one_line


class _Failure(NamedTuple):
    pattern: str
    """A regular expression for the names and texts of an exception and its causes."""
    text: str
    """What is wrong, and the fix; {url} is the address, {bucket} the bucket, {keys} the way to credentials."""
    is_temporary: bool = False
    """Whether the same request may succeed a little later."""


CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or use `aws configure`",
    "gs": "use `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's file",
    "file": "",
    "memory": "",
}
FAILURES = [
    _Failure(r"Install s3fs|Please install gcsfs|No module named '(?:fsspec|s3fs|gcsfs)'|ImportError", "{scheme}:// addresses need packages that are not installed: pip install 'drivetrain[bucket]'"),
    _Failure(r"ProfileNotFound|config profile \(", "{url}: there is no such AWS profile here: correct AWS_PROFILE (`aws configure list-profiles` lists them)"),
    _Failure(r"NoCredentialsError|PartialCredentialsError|Unable to locate credentials|DefaultCredentialsError|Anonymous caller|No such file.*GOOGLE", "{url}: there are no credentials here: {keys}"),
    _Failure(r"ExpiredToken|token has expired|token included in the request is expired|RefreshError|TokenRefreshRequired|SSOTokenLoadError|UnauthorizedSSO|Token has expired|Reauthentication", "{url}: the credentials have expired: log in again"
             " ({keys}); the same command goes on"),
    _Failure(r"RequestTimeTooSkewed|difference between the request time", "{url}: the clock of this machine is wrong: correct it (timedatectl set-ntp true)"),
    _Failure(r"InvalidAccessKeyId|SignatureDoesNotMatch|Access Key Id you provided does not exist|signature we calculated|Invalid Credentials|InvalidToken|invalid_grant|security token .* invalid", "{url}: the store refuses these credentials: {keys}"),
    _Failure(r"NoSuchBucket|specified bucket does not exist|The bucket does not exist", "{url}: there is no bucket {bucket}: create it, or correct the address"),
    _Failure(r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|the region .* is wrong|must be addressed using the specified endpoint", "{url}: the bucket is in another region: set AWS_REGION to that region"),
    _Failure(r"UserProjectMissing|requester pays", "{url}: the bucket's readers pay: it cannot be used for runs"),
    _Failure(r"SlowDown|reduce your request rate|TooManyRequests|Throttl|RequestLimitExceeded|rateLimitExceeded|rate of change|, 429\b|\b429\b", "{url}: the store asks for fewer requests (throttled)", True),
    _Failure(r"AccessDenied|Access Denied|Forbidden|PermissionError|does not have storage\.\w+|AllAccessDisabled|, 403\b", "{url}: access denied: the credentials need to list, read, write and delete objects below this address"),
    _Failure(r"QuotaExceeded|quota.*exceeded|XMinioStorageFull", "{url}: the store is full: make room there, or raise its quota"),
    _Failure(r"EndpointConnectionError|ConnectTimeout|Could not connect to the endpoint|Cannot connect to host|Name or service not known|getaddrinfo|Temporary failure in name resolution|ConnectionRefused|Network is unreachable|No route to host"
             r"|ClientConnectorError|TransportError", "{url}: the store cannot be reached: is the network up, and is the endpoint right?", True),
    _Failure(r"ReadTimeout|FSTimeoutError|TimeoutError|timed out", "{url}: the store does not answer", True),
    _Failure(r"ConnectionClosed|ConnectionReset|ServerDisconnected|ClientPayloadError|IncompleteRead|ResponseParserError|HTTPClientError|ClientOSError|Connection aborted|Broken pipe|ChunkedEncoding|ProxyError|IncompleteBody|BadDigest"
             r"|ContentLengthError|ChecksumError|did not match|Connection lost|Cannot write to closing", "{url}: the connection to the store broke", True),
    _Failure(r"InternalError|ServiceUnavailable|Service Unavailable|internal error|Bad Gateway|Gateway Time|OperationAborted|RequestTimeout|backendError|, 50\d\b|\(50\d\)|\b50[0234]\b", "{url}: the store has a fault of its own", True),
]  # fmt: skip
SECRETS = re.compile(r"(?<=://)[^/@\s]+@|\?[^\s\"']*|\bA(?:KIA|SIA)[0-9A-Z]{12,}|(?i:(?:signature|credential|token|secret|password)=\S+)")


class Temporary(Problem):
    """A failure that passes: the request may be repeated."""


def explain(error: BaseException, url: BucketUrl) -> Problem:
    """Returns the problem of an exception, without any key that its text may hold."""
    if isinstance(error, Problem):
        return error
    if (local := _local_failure(error)) is not None:
        return local
    text = _text(error)
    for failure in FAILURES:
        if re.search(failure.pattern, text):
            line = failure.text.format(url=url, scheme=url.scheme, bucket=url.bucket, keys=CREDENTIALS[url.scheme])
            return Temporary(line, Outcome.INFRA) if failure.is_temporary else Problem(line)
    message = SECRETS.sub("...", one_line(error))[:200]
    return Temporary(f"{url}: {type(error).__name__}: {message}", Outcome.INFRA)


def is_missing_bucket(error: BaseException) -> bool:
    """Whether an object was not found because its bucket is not there."""
    return re.search(r"NoSuchBucket|bucket does not exist", _text(error)) is not None


def _local_failure(error: BaseException) -> Problem | None:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Problem(f"the disk is full ({error.filename or 'no space left'}): make room; the same command goes on", Outcome.INFRA)
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES) and error.filename:
        return Problem(f"{error.filename}: {error.strerror}: this path must be writable")
    return None


def _text(error: BaseException | None) -> str:
    """Returns the names and texts of an exception and what caused it."""
    lines, seen = [], 0
    while error is not None and seen < 6:
        code = getattr(error, "response", None)
        answer = code.get("Error", {}).get("Code", "") if isinstance(code, dict) else ""
        lines.append(f"{type(error).__name__}: {answer} {error}")
        error, seen = error.__cause__ or error.__context__, seen + 1
    return "\n".join(lines)
