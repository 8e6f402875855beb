//! A refusal in words of one's own.

use actix_web::{
    http::{StatusCode, header::HeaderValue},
    web::Bytes,
};

/// A refusal in a policy's own words: [`Policy::wording`](crate::Policy::wording). What is not said
/// stays as it is.
///
/// ```
/// use actix_idempotency::{Code, Policy, Wording};
///
/// let policy = Policy::new().wording(
///     Code::Outstanding,
///     Wording::new().language("zh-CN").detail("订单处理中,请勿重复提交"),
/// );
/// ```
#[derive(Debug, Clone, Default)]
pub struct Wording {
    pub(super) status: Option<StatusCode>,
    pub(super) code: Option<String>,
    pub(super) title: Option<String>,
    pub(super) detail: Option<String>,
    pub(super) language: Option<HeaderValue>,
    pub(super) body: Option<(HeaderValue, Bytes)>,
}

impl Wording {
    /// Says nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Another status.
    #[must_use]
    pub fn status(mut self, status: StatusCode) -> Self {
        self.status = Some(status);
        self
    }

    /// Another `code`.
    #[must_use]
    pub fn code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// Another `title`.
    #[must_use]
    pub fn title(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into());
        self
    }

    /// Another `detail`: what the client is to do, in its language.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// The `Content-Language`; `en` where nothing is said.
    ///
    /// # Panics
    ///
    /// For what cannot stand in a header.
    #[track_caller]
    #[must_use]
    pub fn language(mut self, language: &str) -> Self {
        let Ok(language) = HeaderValue::from_str(language) else {
            panic!("Wording::language: {language:?} cannot stand in a header")
        };
        self.language = Some(language);
        self
    }

    /// A body in place of the problem document: a page for people, for example.
    ///
    /// # Panics
    ///
    /// For a content type that cannot stand in a header.
    #[track_caller]
    #[must_use]
    pub fn body(mut self, content_type: &str, body: impl Into<Bytes>) -> Self {
        let Ok(content_type) = HeaderValue::from_str(content_type) else {
            panic!("Wording::body: {content_type:?} cannot stand in a header")
        };
        self.body = Some((content_type, body.into()));
        self
    }
}
