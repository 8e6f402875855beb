//! How a page gets its tokens.

use std::future::{Ready, ready};

use actix_web::{
    FromRequest, HttpRequest, HttpResponse, Route,
    dev::Payload,
    http::header,
    web::{self, Data},
};
use serde::Serialize;

use crate::{
    refusal::{Code, Refusal},
    telemetry,
    token::{FormToken, FormTokens},
};

/// Issues form tokens for whoever sends a request, by the [`FormTokens`] in the app data.
///
/// ```
/// use actix_idempotency::TokenIssuer;
/// use actix_web::{HttpResponse, Result, get, http::header::ContentType};
///
/// #[get("/checkout")]
/// async fn checkout(tokens: TokenIssuer) -> Result<HttpResponse> {
///     let page = format!(
///         "<form method=\"post\">{} <input name=\"quantity\"> <button>Buy</button></form>",
///         tokens.issue("checkout")?.hidden_input(),
///     );
///     Ok(HttpResponse::Ok().content_type(ContentType::html()).body(page))
/// }
/// ```
///
/// Where there are none, the extraction is 500 `misconfigured`, and the log names the line to add.
#[derive(Debug, Clone)]
pub struct TokenIssuer {
    tokens: Data<FormTokens>,
    request: HttpRequest,
}

impl TokenIssuer {
    /// As [`FormTokens::issue`].
    ///
    /// # Errors
    ///
    /// 401 `principal-missing` where the request names nobody.
    pub fn issue(&self, action: &str) -> Result<FormToken, Refusal> {
        self.tokens.issue(&self.request, action)
    }
}

impl FromRequest for TokenIssuer {
    type Error = Refusal;
    type Future = Ready<Result<Self, Refusal>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let Some(tokens) = request.app_data::<Data<FormTokens>>() else {
            telemetry::misconfigured(
                "TokenIssuer finds no tokens: add .app_data(web::Data::new(FormTokens::new(keys))) to the App",
            );
            return ready(Err(Code::Misconfigured.into()));
        };
        ready(Ok(Self { tokens: tokens.clone(), request: request.clone() }))
    }
}

/// What a script is told.
#[derive(Serialize)]
struct Issued {
    form_token: FormToken,
    expires_in: u64,
}

impl FormTokens {
    /// A GET route for scripts, which send the token in the header
    /// [`Form-Token`](crate::header::FORM_TOKEN):
    ///
    /// ```
    /// use actix_idempotency::{FormTokens, Secret};
    /// use actix_web::web;
    ///
    /// fn configure(config: &mut web::ServiceConfig, tokens: &FormTokens) {
    ///     config.route("/checkout/token", tokens.route("checkout"));
    /// }
    /// ```
    ///
    /// It answers `{"form_token": "…", "expires_in": 600}`, in seconds, with `Cache-Control: no-store`; 401
    /// `principal-missing` where the request names nobody. Do not let scripts of other origins read it (CORS).
    #[must_use]
    pub fn route(&self, action: impl Into<String>) -> Route {
        let (tokens, action) = (self.clone(), action.into());
        web::get().to(move |request: HttpRequest| {
            let issued = tokens.issue(&request, &action).map(|form_token| {
                let expires_in = form_token.lifetime().as_secs();
                HttpResponse::Ok()
                    .insert_header((header::CACHE_CONTROL, "no-store"))
                    .json(Issued { form_token, expires_in })
            });
            ready(issued)
        })
    }
}
