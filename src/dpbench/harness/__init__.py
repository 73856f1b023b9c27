"""Everything around a training: jobs and their configuration, folders of runs, reports, tables of papers."""
