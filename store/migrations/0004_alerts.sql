-- Alerts that outlive a restart: episodes, silences, what each receiver was told, the outbox; and the findings behind them.

CREATE TABLE alert (
    alert_id VARCHAR NOT NULL,
    fingerprint VARCHAR NOT NULL,
    origin VARCHAR NOT NULL,
    state VARCHAR NOT NULL,
    labels VARCHAR NOT NULL,
    annotations VARCHAR NOT NULL,
    starts_ns BIGINT NOT NULL,
    claimed_until_ns BIGINT NOT NULL,
    looks BIGINT NOT NULL,
    baseline VARCHAR,
    fired_ns BIGINT,
    last_seen_ns BIGINT NOT NULL,
    ends_ns BIGINT,
    updated_ns BIGINT NOT NULL
);

CREATE TABLE silence (
    silence_id VARCHAR NOT NULL,
    matchers VARCHAR NOT NULL,
    starts_ns BIGINT NOT NULL,
    ends_ns BIGINT NOT NULL,
    created_by VARCHAR NOT NULL,
    comment VARCHAR NOT NULL
);

CREATE TABLE alert_group (
    receiver VARCHAR NOT NULL,
    group_key VARCHAR NOT NULL,
    labels VARCHAR NOT NULL,
    first_ns BIGINT NOT NULL,
    told_ns BIGINT,
    told VARCHAR NOT NULL
);

CREATE TABLE alert_delivery (
    delivery_id VARCHAR NOT NULL,
    seq BIGINT NOT NULL,
    receiver VARCHAR NOT NULL,
    group_key VARCHAR NOT NULL,
    state VARCHAR NOT NULL,
    content_type VARCHAR NOT NULL,
    body VARCHAR NOT NULL,
    created_ns BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    next_ns BIGINT NOT NULL,
    ended_ns BIGINT,
    message VARCHAR
);

CREATE TABLE finding (
    finding_id BIGINT NOT NULL,
    made_ns BIGINT NOT NULL,
    document VARCHAR NOT NULL
);
