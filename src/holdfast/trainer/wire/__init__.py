"""Tinker's wire protocol, without any I/O: bodies become operations, outcomes become answers.

- `schema.py`: the protobuf messages, from our own table of names and numbers.
- `body.py`: what is done to any body: limits, decompression, JSON, and who is to blame.
- `arrays.py`: tokens and tensors, dense or sparse, checked before anything is allocated.
- `requests.py`, `data.py`, `sampling.py`, `sessions.py`: one function per endpoint, body →
  operation: of models; of those that carry data; about samples and futures; the others.
- `answers.py`: outcome → answer, in protobuf or JSON, whichever the asker reads.

Nothing here trusts a client: every size is bounded, and whatever is wrong with a request is
a `Mistake` whose message names the field.
"""
