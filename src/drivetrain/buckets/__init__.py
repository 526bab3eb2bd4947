"""Runs and finished models in a bucket: an object store of S3's or Google's kind, or a folder (`file:///`).

- `url`: the address of a run in a bucket                 - `store`: reads and writes objects; only this module calls fsspec
- `errors`: what stores answer, with the fix              - `lease`: one writer for each run
- `layout`: which files of a run are copied               - `push`: copies a run to the bucket
- `fetch`: copies a run from the bucket                   - `mirror`: the process that does this while a run trains
- `mirror_settings`: what that process is told, and its waiting times        - `models`: uploads of finished models
"""
