"""Dask and xarray: fields as lazy arrays, in chunks that follow those of the files.

fields = penstock.open("betas_session*.hdf5").to_dask()
mean = fields["betas"].mean(axis=0).compute()
"""

from penstock.dataset.lazy import to_dask

__all__ = ["to_dask"]
