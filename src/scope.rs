//! The scope: whose key it is, and for what.
//!
//! A key means nothing by itself: the same text from two users, for two tenants or at two endpoints
//! is two keys. The parts stand readable in the table; their digest is the row's primary key.

use std::fmt;

use actix_web::{HttpRequest, http::header};

use crate::{digest::Digest, key::IdempotencyKey, policy::Policy, refusal::Code};

/// The most bytes of a part that the table shows as they are.
const MAX_READABLE: usize = 255;

/// Which door a key came through. Keys of different doors never meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Domain {
    Http,
    Once,
    Token,
}

impl Domain {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Once => "once",
            Self::Token => "token",
        }
    }
}

/// Whose key it is, and for what: tenant, principal and resource.
///
/// `Debug` shows tenant and principal as digests.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Scope {
    domain: Domain,
    tenant: Option<String>,
    principal: Option<String>,
    resource: String,
}

impl Scope {
    /// The keys of [`Once`](crate::Once) for one kind of work, of nobody in particular. Keys of requests never
    /// meet those of plain functions, whatever they are called.
    ///
    /// ```
    /// use actix_idempotency::Scope;
    ///
    /// let scope = Scope::once("monthly-invoice").for_tenant("acme").for_principal("alice");
    /// assert_eq!(scope.resource(), "monthly-invoice");
    /// ```
    #[must_use]
    pub fn once(resource: impl Into<String>) -> Self {
        Self { domain: Domain::Once, tenant: None, principal: None, resource: resource.into() }
    }

    /// The keys of requests for one resource (`POST /orders`, or the name that the policy gives), of nobody in
    /// particular: for [`Admin::look`](crate::Admin::look).
    ///
    /// ```
    /// use actix_idempotency::Scope;
    ///
    /// let scope = Scope::request("POST /orders").for_principal("alice");
    /// assert_eq!(scope.principal(), Some("alice"));
    /// ```
    #[must_use]
    pub fn request(resource: impl Into<String>) -> Self {
        Self::http(None, None, resource.into())
    }

    /// The keys of this tenant.
    #[must_use]
    pub fn for_tenant(self, tenant: impl Into<String>) -> Self {
        Self { tenant: Some(tenant.into()), ..self }
    }

    /// The keys of this principal.
    #[must_use]
    pub fn for_principal(self, principal: impl Into<String>) -> Self {
        Self { principal: Some(principal.into()), ..self }
    }

    /// Whatever it was made for: keys of plain functions meet no others.
    pub(crate) fn of_functions(self) -> Self {
        Self { domain: Domain::Once, ..self }
    }

    /// As the table shows it.
    pub(crate) fn shown(
        domain: Domain,
        tenant: Option<String>,
        principal: Option<String>,
        resource: impl Into<String>,
    ) -> Self {
        Self { domain, tenant, principal, resource: resource.into() }
    }

    pub(crate) fn http(tenant: Option<String>, principal: Option<String>, resource: String) -> Self {
        Self { domain: Domain::Http, tenant, principal, resource }
    }

    /// The scope of a form token: what it was signed for. The action stands in for the resource, so that a token
    /// is one key wherever it is sent.
    pub(crate) fn token(tenant: Option<String>, principal: Option<String>, action: String) -> Self {
        Self { domain: Domain::Token, tenant, principal, resource: action }
    }

    /// The scope of a request's key under a policy.
    pub(crate) fn of(request: &HttpRequest, policy: &Policy) -> Result<Self, Code> {
        let tenant = policy.tenant.as_ref().and_then(|tenant| tenant(request));
        let principal = match &policy.principal {
            Some(principal) => principal(request),
            None => credential(request),
        };
        if principal.is_none() && policy.refuses_anonymous() {
            return Err(Code::PrincipalMissing);
        }
        let pattern = request.match_pattern();
        let resource = resource_of(policy, request.method().as_str(), pattern.as_deref().unwrap_or(request.path()));
        Ok(Self::http(tenant, principal, resource))
    }

    /// The scope of the keys of another resource, for whoever asks here.
    pub(crate) fn elsewhere(request: &HttpRequest, policy: &Policy, method: &str, pattern: &str) -> Result<Self, Code> {
        let resource = resource_of(policy, method, pattern);
        Self::of(request, policy).map(|scope| Self { resource, ..scope })
    }

    pub(crate) fn domain(&self) -> Domain {
        self.domain
    }

    /// The tenant that the policy's closure named.
    #[must_use]
    pub fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    /// Who asks: what the policy's closure returned, else a digest of the `Basic` or `Bearer`
    /// credential. `None` is the anonymous principal.
    #[must_use]
    pub fn principal(&self) -> Option<&str> {
        self.principal.as_deref()
    }

    /// Method and route pattern, such as `POST /orders/{id}/payments` (the path, where no pattern is
    /// known), or the name that the policy gives; for a form token its action.
    #[must_use]
    pub fn resource(&self) -> &str {
        &self.resource
    }

    /// The number of the lock by which the claims of one principal take turns where they are counted.
    pub(crate) fn turn(&self) -> i64 {
        let mut digest = Digest::new("actix-idempotency turn 1");
        digest.optional(self.tenant.as_ref()).optional(self.principal.as_ref());
        KeyId(digest.finish()).lock()
    }

    /// The primary key of `key` in this scope. `source` is empty for the header.
    pub(crate) fn id(&self, source: &str, key: &IdempotencyKey) -> KeyId {
        let mut digest = Digest::new("actix-idempotency key 1");
        digest
            .part(self.domain.as_str())
            .optional(self.tenant.as_ref())
            .optional(self.principal.as_ref())
            .part(&self.resource)
            .part(key.as_str());
        if !source.is_empty() {
            digest.part(source);
        }
        KeyId(digest.finish())
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope")
            .field("tenant", &self.tenant().map(redacted))
            .field("principal", &self.principal().map(redacted))
            .field("resource", &self.resource)
            .finish()
    }
}

fn resource_of(policy: &Policy, method: &str, pattern: &str) -> String {
    policy.resource.clone().unwrap_or_else(|| format!("{method} {pattern}"))
}

/// A digest of the `Basic` or `Bearer` credential.
pub(crate) fn credential(request: &HttpRequest) -> Option<String> {
    let (scheme, credential) = request.headers().get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let scheme = ["basic", "bearer"].into_iter().find(|known| scheme.eq_ignore_ascii_case(known))?;
    let mut digest = Digest::new("actix-idempotency credential 1");
    digest.part(scheme).part(credential.trim());
    Some(format!("sha256:{}", hex::encode(digest.finish())))
}

/// What a log line shows of a value that is not for logs: enough to see that two are the same.
pub(crate) fn redacted(value: &str) -> String {
    let mut digest = Digest::new("actix-idempotency log 1");
    digest.part(value);
    hex::encode(&digest.finish()[..6])
}

/// The value as the table shows it. What is too long for its column, or cannot be stored in Postgres
/// (NUL) or shown on one line, appears as its digest.
pub(crate) fn readable(value: &str) -> String {
    if (1..=MAX_READABLE).contains(&value.len()) && !value.chars().any(char::is_control) {
        return value.to_owned();
    }
    let mut digest = Digest::new("actix-idempotency readable 1");
    digest.part(value);
    format!("sha256:{}", hex::encode(digest.finish()))
}

/// The primary key of a row.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct KeyId(pub(crate) [u8; 32]);

impl KeyId {
    /// The number of its lock under `Policy::atomic()`: the first 64 bits.
    pub(crate) fn lock(&self) -> i64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        i64::from_be_bytes(first)
    }

    /// The first bytes, by which a log line finds its row:
    /// `where encode(id, 'hex') like '…%'`.
    pub(crate) fn prefix(&self) -> String {
        hex::encode(&self.0[..6])
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({}…)", self.prefix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(tenant: Option<&str>, principal: Option<&str>, resource: &str, key: &str) -> KeyId {
        Scope::http(tenant.map(Into::into), principal.map(Into::into), resource.into())
            .id("", &IdempotencyKey::try_from(key).unwrap())
    }

    #[test]
    fn every_part_makes_another_key() {
        let all = [
            id(None, None, "POST /a", "k"),
            id(Some("1"), None, "POST /a", "k"),
            id(None, Some("1"), "POST /a", "k"),
            id(Some("1"), Some("1"), "POST /a", "k"),
            id(None, Some(""), "POST /a", "k"),
            id(None, None, "POST /b", "k"),
            id(None, None, "POST /a", "l"),
            id(None, None, "POST /", "ak"),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{i}");
        }
    }

    #[test]
    fn what_a_column_cannot_hold_is_shown_as_a_digest() {
        assert_eq!(readable("alice"), "alice");
        for odd in ["", "a\0b", "a\nb", &"x".repeat(256)] {
            let shown = readable(odd);
            assert!(shown.starts_with("sha256:") && shown.len() == 71, "{shown}");
        }
    }

    #[test]
    fn debug_names_nobody() {
        let scope = Scope::http(Some("acme".into()), Some("alice".into()), "POST /orders".into());
        let shown = format!("{scope:?}");
        assert!(!shown.contains("acme") && !shown.contains("alice"), "{shown}");
    }
}
