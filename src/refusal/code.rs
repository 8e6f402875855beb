//! Every code, with its status and its words.

use std::fmt;

use actix_web::http::StatusCode;

/// The stable `code` of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// 400: the policy requires a key.
    KeyMissing,
    /// 400: the key cannot be read.
    KeyInvalid,
    /// 400: the body was cut off.
    BodyTruncated,
    /// 400: the policy requires a form token.
    TokenMissing,
    /// 400: what stands for the form token is none, or there are two different ones.
    TokenInvalid,
    /// 403: the form token was signed with a key that is not in use here.
    TokenUnknown,
    /// 403: the signature of the form token is wrong.
    TokenForged,
    /// 403: the form token is for another form.
    TokenOfOtherAction,
    /// 403: the form token was issued to somebody else.
    TokenOfOtherPrincipal,
    /// 403: the form token has expired before it was used.
    TokenExpired,
    /// 409: the form was sent already, with other contents or under a policy that tells no more.
    TokenUsed,
    /// 401: the policy wants to know who asks.
    PrincipalMissing,
    /// 403: the policy does not let this request see the stored answer.
    ReplayForbidden,
    /// 404: asked for its status: nothing is known of the key, or no longer.
    KeyUnknown,
    /// 406: the stored answer is compressed, and the request does not accept that.
    CodingNotAccepted,
    /// 408: the body did not arrive in time.
    BodyTimeout,
    /// 409: the first request still runs.
    Outstanding,
    /// 409: an attempt has ended without an answer, and the key is held: nobody runs it, and nobody may yet.
    Held,
    /// 409: this attempt was overtaken by another.
    LeaseLost,
    /// 409: the transaction lost against another one.
    Serialization,
    /// 409: a deferred constraint failed at COMMIT.
    ConstraintViolated,
    /// 409: by policy: it was done, and the answer is not told again.
    AlreadyCompleted,
    /// 400: the `If-Match` cannot be read.
    IfMatchInvalid,
    /// 400: the id of a message cannot be one.
    MessageIdInvalid,
    /// 404: no such row.
    NotFound,
    /// 409: the row has another version than the caller expected.
    Stale,
    /// 409: the row has the largest version there is.
    VersionOverflow,
    /// 409: less is left than is asked for.
    NotEnough,
    /// 409: the row is in another state than the move starts from.
    Elsewhere,
    /// 409: no such move is declared.
    MoveNotAllowed,
    /// 409: a unique constraint. A service may send it under a code of its own.
    Duplicate,
    /// 412: the `If-Match` does not name the current version.
    IfMatchFailed,
    /// 413: the body is over the request limit.
    BodyTooLarge,
    /// 422: same key, other request.
    KeyReused,
    /// 429: too many keys of this principal.
    QuotaExceeded,
    /// 422: same message id, other content.
    MessageIdReused,
    /// 422: an amount that is not positive, or too large.
    AmountInvalid,
    /// 428: no `If-Match`.
    IfMatchMissing,
    /// 500: the handler panicked.
    HandlerPanicked,
    /// 500: the body of the answer failed before it was kept.
    BodyFailed,
    /// 500: the handler swallowed the error of a statement.
    TransactionAborted,
    /// 500: the handler left its transaction as it must not.
    TransactionMisused,
    /// 500: the service is set up wrong.
    Misconfigured,
    /// 500: a statement failed.
    QueryFailed,
    /// 500: the row is in a state that the service does not know.
    StateUnknown,
    /// 503: no store, no execution.
    StoreUnavailable,
    /// 503: too many requests run already.
    Busy,
    /// 503: this process takes no new work.
    ShuttingDown,
    /// 503: the row was written by a newer version of this crate.
    NewerVersion,
    /// 503: it may have been executed.
    OutcomeUnknown,
}

impl Code {
    /// The code on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.row().0
    }

    /// The status it is sent with.
    #[must_use]
    pub fn status(self) -> StatusCode {
        self.row().1
    }

    /// Whether it depends on the moment: the same request may be answered otherwise soon, so that it is never kept for
    /// retries, whatever the policy keeps.
    #[must_use]
    pub fn is_transient(self) -> bool {
        use Code as C;
        match self {
            C::BodyTruncated
            | C::CodingNotAccepted
            | C::BodyTimeout
            | C::PrincipalMissing
            | C::ReplayForbidden
            | C::Outstanding
            | C::Held
            | C::LeaseLost
            | C::Serialization
            | C::QuotaExceeded
            | C::BodyFailed
            | C::TransactionAborted
            | C::StoreUnavailable
            | C::Busy
            | C::ShuttingDown
            | C::NewerVersion
            | C::OutcomeUnknown => true,
            C::KeyMissing
            | C::KeyInvalid
            | C::TokenMissing
            | C::TokenInvalid
            | C::TokenUnknown
            | C::TokenForged
            | C::TokenOfOtherAction
            | C::TokenOfOtherPrincipal
            | C::TokenExpired
            | C::TokenUsed
            | C::KeyUnknown
            | C::ConstraintViolated
            | C::AlreadyCompleted
            | C::IfMatchInvalid
            | C::MessageIdInvalid
            | C::NotFound
            | C::Stale
            | C::VersionOverflow
            | C::NotEnough
            | C::Elsewhere
            | C::MoveNotAllowed
            | C::Duplicate
            | C::IfMatchFailed
            | C::BodyTooLarge
            | C::KeyReused
            | C::MessageIdReused
            | C::AmountInvalid
            | C::IfMatchMissing
            | C::HandlerPanicked
            | C::TransactionMisused
            | C::Misconfigured
            | C::QueryFailed
            | C::StateUnknown => false,
        }
    }

    pub(super) fn title(self) -> &'static str {
        self.row().2
    }

    pub(crate) fn detail(self) -> &'static str {
        self.row().3
    }

    /// Code, status, title (the draft's own words where it has some: section 2.7) and what to do.
    #[rustfmt::skip]
    fn row(self) -> (&'static str, StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::KeyMissing => ("key-missing", S::BAD_REQUEST, "Idempotency-Key is missing",
                "Send an Idempotency-Key header: one key for one intent, the same on every retry of it."),
            Self::KeyInvalid => ("key-invalid", S::BAD_REQUEST, "Idempotency-Key is invalid",
                "Send exactly one Idempotency-Key header with 1 to 255 visible ASCII characters, a UUID for example."),
            Self::BodyTruncated => ("body-truncated", S::BAD_REQUEST, "The request body is incomplete",
                "The body was cut off or cannot be read. Nothing was done; retry with the same key."),
            Self::TokenMissing => ("token-missing", S::BAD_REQUEST, "The form token is missing",
                "Nothing was done: send the hidden field of the form as it came, or its token in the header Form-Token."),
            Self::TokenInvalid => ("token-invalid", S::BAD_REQUEST, "The form token is invalid",
                "Nothing was done: what stands for the form token is none. Load the form again."),
            Self::TokenUnknown => ("token-unknown", S::FORBIDDEN, "The form token is unknown",
                "Nothing was done: the token is too old, or from somewhere else. Load the form again."),
            Self::TokenForged => ("token-forged", S::FORBIDDEN, "The form token is not genuine",
                "Nothing was done. Load the form again."),
            Self::TokenOfOtherAction => ("token-of-other-action", S::FORBIDDEN, "The form token is for another form",
                "Nothing was done. Load the form again."),
            Self::TokenOfOtherPrincipal => ("token-of-other-principal", S::FORBIDDEN, "The form token is somebody else's",
                "Nothing was done: the form was loaded under another login, or before it. Load the form again."),
            Self::TokenExpired => ("token-expired", S::FORBIDDEN, "The form token has expired",
                "The form was open for too long, and this request did nothing. Load the form again."),
            Self::TokenUsed => ("token-used", S::CONFLICT, "The form was sent already",
                "It was accepted the first time and not done again. Load the form again to send another one."),
            Self::PrincipalMissing => ("principal-missing", S::UNAUTHORIZED, "Authentication is required",
                "Keys belong to somebody here: authenticate and retry with the same key."),
            Self::ReplayForbidden => ("replay-forbidden", S::FORBIDDEN, "The stored answer is not for this request",
                "The request with this key was answered, and you may not see the answer now."),
            Self::KeyUnknown => ("key-unknown", S::NOT_FOUND, "Nothing is known of this Idempotency-Key",
                "No request of yours with this key runs or has been completed, or it has expired."),
            Self::CodingNotAccepted => ("coding-not-accepted", S::NOT_ACCEPTABLE, "The stored answer is encoded otherwise",
                "The request with this key was answered, in an encoding that this request does not accept. Retry with the \
                 same key and the Accept-Encoding of the first request."),
            Self::BodyTimeout => ("body-timeout", S::REQUEST_TIMEOUT, "The request body did not arrive in time",
                "Nothing was done; retry with the same key."),
            Self::Outstanding => ("outstanding", S::CONFLICT, "A request is outstanding for this Idempotency-Key",
                "The first request with this key still runs. Retry with the same key to get its answer."),
            Self::Held => ("held", S::CONFLICT, "The outcome for this Idempotency-Key is not known",
                "The first request with this key has ended without an answer, and nobody runs it now. The service has to \
                 look into it; asking again soon tells nothing new."),
            Self::LeaseLost => ("lease-lost", S::CONFLICT, "Another attempt has taken over this Idempotency-Key",
                "This attempt took longer than its lease. Retry with the same key to get the answer of the other one."),
            Self::Serialization => ("serialization", S::CONFLICT, "Another transaction was first",
                "Nothing was done; retry with the same key."),
            Self::ConstraintViolated => ("constraint-violated", S::CONFLICT, "A constraint was violated",
                "Nothing was done: the request contradicts what is stored."),
            Self::AlreadyCompleted => ("already-completed", S::CONFLICT, "This was done already",
                "The same request was completed a moment ago; it was not done again."),
            Self::QuotaExceeded => ("quota-exceeded", S::TOO_MANY_REQUESTS, "Too many idempotency keys",
                "Nothing was done; let earlier requests end, and retry with the same key."),
            Self::IfMatchInvalid => ("if-match-invalid", S::BAD_REQUEST, "If-Match is invalid",
                "Send the ETag that a GET of the resource answered with."),
            Self::MessageIdInvalid => ("message-id-invalid", S::BAD_REQUEST, "The message id is invalid",
                "Nothing was done: an id is 1 to 255 bytes, without control characters and not only blanks."),
            Self::NotFound => ("not-found", S::NOT_FOUND, "There is no such resource",
                "Nothing was done: it does not exist, or no longer."),
            Self::Stale => ("stale", S::CONFLICT, "The resource has changed",
                "Somebody else was first. Nothing was done: read the resource again and decide anew."),
            Self::VersionOverflow => ("version-overflow", S::CONFLICT, "The resource cannot be changed any more",
                "Nothing was done: it has the largest version there is."),
            Self::NotEnough => ("not-enough", S::CONFLICT, "There is not enough left",
                "Nothing was done: less is left than was asked for."),
            Self::Elsewhere => ("elsewhere", S::CONFLICT, "The resource is in another state",
                "Nothing was done: from its present state it cannot go there."),
            Self::MoveNotAllowed => ("move-not-allowed", S::CONFLICT, "There is no such move",
                "Nothing was done: the resource never goes from the one state to the other."),
            Self::Duplicate => ("duplicate", S::CONFLICT, "It exists already",
                "Nothing was done: there can be only one of it."),
            Self::IfMatchFailed => ("if-match-failed", S::PRECONDITION_FAILED, "The resource has changed",
                "It has another version than If-Match names; ETag tells the current one. Nothing was done: read it again and decide anew."),
            Self::BodyTooLarge => ("body-too-large", S::PAYLOAD_TOO_LARGE, "The request body is too large",
                "Nothing was done."),
            Self::KeyReused => ("key-reused", S::UNPROCESSABLE_ENTITY, "Idempotency-Key is already used",
                "This key was used with another request. Send the request it was used with, or use a new key."),
            Self::MessageIdReused => ("message-id-reused", S::UNPROCESSABLE_ENTITY, "The message id is already used",
                "Nothing was done: this id belongs to a message with another content."),
            Self::AmountInvalid => ("amount-invalid", S::UNPROCESSABLE_ENTITY, "The amount is invalid",
                "Nothing was done: an amount is 1 or more, and no more than there can be."),
            Self::IfMatchMissing => ("if-match-missing", S::PRECONDITION_REQUIRED, "If-Match is missing",
                "Send If-Match with the ETag that a GET of the resource answered with."),
            Self::HandlerPanicked => ("handler-panicked", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The request failed and its key is free: retry with the same key."),
            Self::BodyFailed => ("body-failed", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The answer could not be produced and its key is free: retry with the same key."),
            Self::TransactionAborted => ("transaction-aborted", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The request failed, nothing was done, and its key is free: retry with the same key."),
            Self::TransactionMisused => ("transaction-misused", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The request failed; the log of the service says why."),
            Self::Misconfigured => ("misconfigured", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The service is set up wrong. Nothing was done."),
            Self::QueryFailed => ("query-failed", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The request failed; the log of the service says why."),
            Self::StateUnknown => ("state-unknown", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The resource is in a state that this version of the service does not know. Nothing was done."),
            Self::StoreUnavailable => ("store-unavailable", S::SERVICE_UNAVAILABLE, "Service unavailable",
                "Nothing was done; retry with the same key."),
            Self::Busy => ("busy", S::SERVICE_UNAVAILABLE, "Service unavailable",
                "Too many requests run already. Nothing was done; retry with the same key."),
            Self::ShuttingDown => ("shutting-down", S::SERVICE_UNAVAILABLE, "Service unavailable",
                "This server is going down. Nothing was done; retry with the same key."),
            Self::NewerVersion => ("newer-version", S::SERVICE_UNAVAILABLE, "Service unavailable",
                "Another version of this service has the answer; retry with the same key."),
            Self::OutcomeUnknown => ("outcome-unknown", S::SERVICE_UNAVAILABLE, "The outcome is unknown",
                "The request may have been executed. Retry with the same key and you will be told."),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
