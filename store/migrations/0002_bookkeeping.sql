-- The relational side: senders, applied batches, the books of each kind, sealed files, settings, the audit of SQL.

CREATE TABLE sender (
    source VARCHAR NOT NULL,
    epoch VARCHAR NOT NULL,
    first_received_ns BIGINT NOT NULL,
    last_received_ns BIGINT NOT NULL,
    num_batches BIGINT NOT NULL,
    num_rows MAP(VARCHAR, BIGINT) NOT NULL,
    clock_offset_s DOUBLE,
    clock_error_s DOUBLE
);

CREATE TABLE batch_range (
    source VARCHAR NOT NULL,
    epoch VARCHAR NOT NULL,
    first_seq BIGINT NOT NULL,
    last_seq BIGINT NOT NULL
);

CREATE TABLE batch_journal (
    source VARCHAR NOT NULL,
    epoch VARCHAR NOT NULL,
    first_seq BIGINT,
    last_seq BIGINT,
    received_ns BIGINT NOT NULL,
    num_batches BIGINT NOT NULL,
    num_rows MAP(VARCHAR, BIGINT) NOT NULL,
    clock_offset_s DOUBLE,
    clock_error_s DOUBLE
);

CREATE TABLE kind_state (
    kind VARCHAR NOT NULL,
    num_removed BIGINT NOT NULL,
    sealed_through_ns BIGINT
);

CREATE TABLE seal_log (
    seal_id BIGINT NOT NULL,
    kind VARCHAR NOT NULL,
    path VARCHAR NOT NULL,
    run_id VARCHAR,
    num_rows BIGINT NOT NULL,
    num_bytes BIGINT,
    after_ns BIGINT NOT NULL,
    through_ns BIGINT NOT NULL,
    sealed_ns BIGINT
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

INSERT INTO kind_state (kind, num_removed) VALUES
    ('request', 0),
    ('step', 0),
    ('block', 0),
    ('route', 0),
    ('transfer', 0),
    ('worker', 0),
    ('check', 0),
    ('sample', 0),
    ('mark', 0);
