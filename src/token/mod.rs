//! Form tokens: keys that the server issues, signed and not stored.

mod invalid;
mod signed;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use actix_web::HttpRequest;

pub(crate) use self::invalid::InvalidToken;
pub use self::signed::FormToken;
use self::signed::Terms;
use crate::{
    key::IdempotencyKey,
    refusal::{Code, Refusal},
    scope::{Scope, credential},
    secret::Secret,
};

/// How long a form token may be used: ten minutes, what it takes to fill in a long form. A form that was left
/// open for longer is better shown again.
pub const DEFAULT_TOKEN_LIFETIME: Duration = Duration::from_secs(10 * 60);

/// The name of the hidden field that carries a form token.
pub const FORM_TOKEN_FIELD: &str = "form_token";

type Who = Arc<dyn Fn(&HttpRequest) -> Option<String> + Send + Sync>;

/// Issues form tokens, and knows them again. One for a service, in `web::Data`; see
/// [the module](crate::form_token).
///
/// ```
/// use std::time::Duration;
/// use actix_idempotency::{FormTokens, Secret};
///
/// # fn secret_of_the_deployment() -> [u8; 32] { [7; 32] }
/// // For everybody, also for those who are not logged in.
/// let tokens = FormTokens::new([Secret::new(secret_of_the_deployment())]).anonymous();
///
/// // Tokens belong to the user of the session, and may be used for half an hour.
/// let tokens = FormTokens::new([Secret::new(secret_of_the_deployment())])
///     .principal(|req| req.headers().get("x-user")?.to_str().ok().map(str::to_owned))
///     .lifetime(Duration::from_secs(30 * 60));
/// ```
///
/// There is no default key: whoever knows a key can make tokens. All processes of a service have the same
/// keys, or a form that one of them shows cannot be sent to another.
#[derive(Clone)]
pub struct FormTokens {
    secrets: Arc<[Secret]>,
    lifetime: Duration,
    tenant: Option<Who>,
    principal: Option<Who>,
    is_anonymous: bool,
}

impl FormTokens {
    /// The first key signs; all of them are tried when a token comes back. To rotate, put the new key second
    /// in every process, then first, and drop the old one when the last token that it signed has expired.
    ///
    /// # Panics
    ///
    /// For no key at all.
    #[track_caller]
    #[must_use]
    pub fn new(keys: impl IntoIterator<Item = Secret>) -> Self {
        let secrets: Arc<[Secret]> = keys.into_iter().collect();
        assert!(!secrets.is_empty(), "FormTokens::new: give at least one key");
        Self { secrets, lifetime: DEFAULT_TOKEN_LIFETIME, tenant: None, principal: None, is_anonymous: false }
    }

    /// How long a token may be used, from its issue. It is counted from the clock of the process that issues
    /// and judged by the clock of the database: what lies between the two is added to it or missing.
    /// Default: [`DEFAULT_TOKEN_LIFETIME`]. The answer to a form is kept longer than its token lives, so a
    /// policy with a shorter [`retention`](crate::Policy::retention) does not build.
    ///
    /// # Panics
    ///
    /// Below one second and beyond a year.
    #[track_caller]
    #[must_use]
    pub fn lifetime(mut self, lifetime: Duration) -> Self {
        let range = Duration::from_secs(1)..=Duration::from_secs(365 * 24 * 60 * 60);
        assert!(range.contains(&lifetime), "FormTokens::lifetime: {lifetime:?} is not between a second and a year");
        self.lifetime = lifetime;
        self
    }

    /// To whom a token is issued, and who may use it: a user id from the session. It is asked when the form
    /// is shown and again when it is sent, and stands in for
    /// [`Policy::principal`](crate::Policy::principal) where the key is a token. `None` is 401
    /// `principal-missing`, unless tokens may be [`anonymous`](Self::anonymous).
    ///
    /// Default: a digest of the credential in `Authorization: Basic` or `Bearer`.
    #[must_use]
    pub fn principal(mut self, principal: impl Fn(&HttpRequest) -> Option<String> + Send + Sync + 'static) -> Self {
        self.principal = Some(Arc::new(principal));
        self
    }

    /// For which tenant, where one principal acts for several. It stands in for
    /// [`Policy::tenant`](crate::Policy::tenant) where the key is a token. Default: none.
    #[must_use]
    pub fn tenant(mut self, tenant: impl Fn(&HttpRequest) -> Option<String> + Send + Sync + 'static) -> Self {
        self.tenant = Some(Arc::new(tenant));
        self
    }

    /// Issues tokens also where nobody is named, for forms that need no login. Such a token belongs to whoever
    /// has it: it is a guard against double submits, and none against forged ones (CSRF).
    #[must_use]
    pub fn anonymous(mut self) -> Self {
        self.is_anonymous = true;
        self
    }

    /// A token for whoever asks here. Nothing is written, here or in the database. `action` names what the form
    /// does, such as `checkout`: a token for one is none for another.
    ///
    /// # Errors
    ///
    /// 401 `principal-missing` where the request names nobody.
    ///
    /// # Panics
    ///
    /// If the clock of this machine stands before 1970.
    pub fn issue(&self, request: &HttpRequest, action: &str) -> Result<FormToken, Refusal> {
        let scope = self.scope(request, action)?;
        Ok(FormToken::sign(&self.secrets[0], &scope, self.lifetime, now() + self.lifetime))
    }

    /// What a token stands for, if it is one of ours, for this action and whoever asks here. Whether it has
    /// expired is for the database to say.
    pub(crate) fn admit(
        &self,
        text: &str,
        request: &HttpRequest,
        action: &str,
    ) -> Result<(IdempotencyKey, Admitted), Refusal> {
        let scope = self.scope(request, action)?;
        let Terms { id, not_after } = FormToken::verify(text, &self.secrets, &scope)?;
        let token = FormToken::admitted(text, self.lifetime);
        // The id alone is the key of the row: the token itself is stored nowhere.
        Ok((IdempotencyKey::try_from(hex::encode(id))?, Admitted { scope, not_after, token }))
    }

    pub(crate) fn lifetime_of_tokens(&self) -> Duration {
        self.lifetime
    }

    pub(crate) fn has_tenant(&self) -> bool {
        self.tenant.is_some()
    }

    pub(crate) fn has_principal(&self) -> bool {
        self.principal.is_some()
    }

    pub(crate) fn may_be_anonymous(&self) -> bool {
        self.is_anonymous
    }

    fn scope(&self, request: &HttpRequest, action: &str) -> Result<Scope, Code> {
        let tenant = self.tenant.as_ref().and_then(|tenant| tenant(request));
        let principal = match &self.principal {
            Some(principal) => principal(request),
            None => credential(request),
        };
        if principal.is_none() && !self.is_anonymous {
            return Err(Code::PrincipalMissing);
        }
        Ok(Scope::token(tenant, principal, action.to_owned()))
    }
}

/// `Debug` shows no key.
impl fmt::Debug for FormTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FormTokens").field("lifetime", &self.lifetime).finish_non_exhaustive()
    }
}

/// A token that may be used, if it has not expired.
#[derive(Debug)]
pub(crate) struct Admitted {
    /// What it was signed for.
    pub(crate) scope: Scope,
    /// When it expires, in milliseconds since 1970.
    pub(crate) not_after: i64,
    pub(crate) token: FormToken,
}

/// Since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock should stand after 1970")
}
