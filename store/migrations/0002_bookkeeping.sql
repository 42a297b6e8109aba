-- The relational side: senders, applied batches, the books of each kind, sealed files, settings, the audit of people's SQL.

CREATE TABLE source (
    source VARCHAR NOT NULL,
    epoch VARCHAR NOT NULL,
    first_received_ns BIGINT NOT NULL,
    last_received_ns BIGINT NOT NULL,
    num_batches BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    clock_offset_s DOUBLE,
    clock_error_s DOUBLE
);

CREATE TABLE batch_range (
    source VARCHAR NOT NULL,
    epoch VARCHAR NOT NULL,
    first_seq BIGINT NOT NULL,
    last_seq BIGINT NOT NULL
);

CREATE TABLE row_count (
    kind VARCHAR NOT NULL,
    appended BIGINT NOT NULL,
    removed BIGINT NOT NULL,
    sealed_through_ns BIGINT
);

CREATE TABLE seal_log (
    seal_id BIGINT NOT NULL,
    kind VARCHAR NOT NULL,
    path VARCHAR NOT NULL,
    run_id VARCHAR,
    num_rows BIGINT NOT NULL,
    num_bytes BIGINT NOT NULL,
    first_received_ns BIGINT NOT NULL,
    last_received_ns BIGINT NOT NULL,
    sealed_ns BIGINT NOT NULL
);

CREATE TABLE setting (
    name VARCHAR NOT NULL,
    value VARCHAR NOT NULL
);

CREATE TABLE sql_audit (
    at_ns BIGINT NOT NULL,
    who VARCHAR,
    sql VARCHAR NOT NULL,
    outcome VARCHAR NOT NULL,
    num_rows BIGINT,
    duration_s DOUBLE,
    message VARCHAR
);

INSERT INTO row_count (kind, appended, removed) VALUES
    ('request', 0, 0),
    ('step', 0, 0),
    ('block', 0, 0),
    ('route', 0, 0),
    ('transfer', 0, 0),
    ('worker', 0, 0),
    ('check', 0, 0),
    ('sample', 0, 0),
    ('mark', 0, 0);
