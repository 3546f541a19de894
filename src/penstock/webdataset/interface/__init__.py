"""The interface of the ``webdataset`` package, module by module: its names, over the verbs of ``penstock.webdataset``.

``penstock.webdataset.filters`` is the module ``filters`` here, and so is ``webdataset.filters`` after
``penstock.webdataset.install()``. Names that would run a command or unpickle are here too; using them is an error that
says what to do instead.
"""
