//! What a request asks of the store, and what the table shows of it.

use crate::{
    engine::ending::millis,
    fingerprint::{Fingerprint, RECIPE_VERSION},
    key::IdempotencyKey,
    policy::Policy,
    postgres::keys::NewClaim,
    request_id::RequestId,
    scope::{Domain, KeyId, Scope, readable},
    source::Found,
};

/// What a request asks of the store.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) id: KeyId,
    pub(crate) key: IdempotencyKey,
    pub(crate) scope: Scope,
    pub(crate) fingerprint: Fingerprint,
    /// When the key can no longer be claimed, in milliseconds since 1970, by the database's clock.
    pub(crate) not_after: Option<i64>,
    /// Of this request.
    pub(crate) request_id: Option<RequestId>,
}

impl Ask {
    pub(crate) fn new(found: Found, scope: Scope, fingerprint: Fingerprint, request_id: Option<RequestId>) -> Self {
        let id = scope.id(&found.source, &found.key);
        let not_after = found.form.map(|form| form.not_after);
        Self { id, key: found.key, scope, fingerprint, not_after, request_id }
    }

    /// Whether the key is a form token.
    pub(crate) fn is_of_a_form(&self) -> bool {
        self.scope.domain() == Domain::Token
    }

    /// Of a plain function.
    pub(crate) fn of_function(
        key: IdempotencyKey,
        scope: Scope,
        fingerprint: Fingerprint,
        request_id: Option<RequestId>,
    ) -> Self {
        Self { id: scope.id("", &key), key, scope, fingerprint, not_after: None, request_id }
    }
}

/// What the table shows of a request to people who look.
pub(crate) struct Columns {
    pub(crate) tenant: Option<String>,
    pub(crate) principal: Option<String>,
    resource: String,
}

impl Columns {
    pub(crate) fn of(ask: &Ask) -> Self {
        Self {
            tenant: ask.scope.tenant().map(readable),
            principal: ask.scope.principal().map(readable),
            resource: readable(ask.scope.resource()),
        }
    }

    pub(crate) fn new_claim<'a>(
        &'a self,
        ask: &'a Ask,
        owner: &'a [u8],
        seed: &'a [u8],
        policy: &Policy,
    ) -> NewClaim<'a> {
        NewClaim {
            id: &ask.id.0,
            domain: ask.scope.domain().as_str(),
            tenant: self.tenant.as_deref(),
            principal: self.principal.as_deref(),
            resource: &self.resource,
            key: ask.key.as_str(),
            fingerprint: &ask.fingerprint.digest,
            recipe: &ask.fingerprint.recipe.0,
            recipe_version: RECIPE_VERSION,
            owner,
            seed,
            lease_ms: millis(policy.lease),
            retention_ms: policy.retention.map(millis),
            not_after_ms: ask.not_after,
            request_id: ask.request_id.as_ref().map(RequestId::as_str),
            lock_timeout_ms: millis(policy.lock_timeout()),
            is_durable: policy.durable_claims,
        }
    }
}
