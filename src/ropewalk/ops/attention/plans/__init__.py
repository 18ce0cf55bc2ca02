"""Kinds of eager calls of `attention` and their plans: what `ops/launch` does for other operations by a record alone.

============  =========================================================================================
`find`        a call, before its arguments are validated, to its kind
`norms`       the norm beside a rotation, which comes before
`planned`     the kinds that kernels run; also over caches that grow
`inputs`      the tensors that their plans read: the caller's, those of each call, and the kind's own
`library`     the kinds that a library runs, and the rotation before it
`backward`    forwards and backwards of validated calls, and the backwards of recorded ones
============  =========================================================================================
"""
