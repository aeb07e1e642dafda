-- The epoch of the turn that another process wants to cancel. The process that runs that turn watches this column.
ALTER TABLE crow.sessions ADD COLUMN cancelled_epoch bigint;
