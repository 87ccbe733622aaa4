(* T8: curvature of a LoRA block. Along (A + t X, B + t Y) the weight W + s B A moves, and the second derivative of
   f is  H [s (B X + Y A)] + 2 s <G, Y X>  (H the Hessian form, G the gradient in W). In any normed spaces of
   matrices, with a, b the spectral bounds of A, B, this is at most lambda (|X|^2 + |Y|^2), lambda the larger
   eigenvalue of a symmetric 2 x 2 matrix; the bound of that 2 x 2 form is attained. *)
From Coq Require Import Reals Lra Psatz.
From Coquelicot Require Import Coquelicot.
Open Scope R_scope.

Definition lora_lambda (c a b sG : R) : R :=
  c * (a ^ 2 + b ^ 2) / 2 + sqrt (c ^ 2 * (a ^ 2 - b ^ 2) ^ 2 / 4 + (c * a * b + sG) ^ 2).

Definition lora_form (c a b sG u v : R) : R := c * (b * u + a * v) ^ 2 + 2 * sG * u * v.

Lemma form_le c a b sG u v : lora_form c a b sG u v <= lora_lambda c a b sG * (u ^ 2 + v ^ 2).
Proof.
  unfold lora_form, lora_lambda. set (d := c * (a ^ 2 - b ^ 2) / 2). set (e := c * a * b + sG).
  assert (Hr : 0 <= d ^ 2 + e ^ 2) by (pose proof (pow2_ge_0 d); pose proof (pow2_ge_0 e); lra).
  replace (c ^ 2 * (a ^ 2 - b ^ 2) ^ 2 / 4) with (d ^ 2) by (unfold d; field).
  pose proof (sqrt_pos (d ^ 2 + e ^ 2)) as R0. pose proof (pow2_sqrt _ Hr) as R2.
  set (r := sqrt (d ^ 2 + e ^ 2)) in *.
  (* the form is c (a^2+b^2)/2 (u^2+v^2) - d (u^2 - v^2) + 2 e u v, and the rest is at most r (u^2+v^2) *)
  assert (K : - d * (u ^ 2 - v ^ 2) + 2 * e * u * v <= r * (u ^ 2 + v ^ 2)).
  { assert (U : 0 <= u ^ 2 + v ^ 2) by (pose proof (pow2_ge_0 u); pose proof (pow2_ge_0 v); lra).
    apply Rsqr_incr_0_var; [|apply Rmult_le_pos; assumption]. rewrite !Rsqr_pow2.
    replace ((r * (u ^ 2 + v ^ 2)) ^ 2) with ((d ^ 2 + e ^ 2) * (u ^ 2 + v ^ 2) ^ 2) by (rewrite <- R2; ring).
    pose proof (pow2_ge_0 (e * (u ^ 2 - v ^ 2) + 2 * d * u * v)). lra. }
  unfold d, e in *. lra.
Qed.

Lemma form_attained c a b sG : exists u v, u ^ 2 + v ^ 2 = 1 /\
  lora_form c a b sG u v = lora_lambda c a b sG.
Proof.
  unfold lora_form, lora_lambda. set (d := c * (a ^ 2 - b ^ 2) / 2). set (e := c * a * b + sG).
  assert (Hr : 0 <= d ^ 2 + e ^ 2) by (pose proof (pow2_ge_0 d); pose proof (pow2_ge_0 e); lra).
  replace (c ^ 2 * (a ^ 2 - b ^ 2) ^ 2 / 4) with (d ^ 2) by (unfold d; field).
  pose proof (sqrt_pos (d ^ 2 + e ^ 2)) as R0. pose proof (pow2_sqrt _ Hr) as R2.
  set (r := sqrt (d ^ 2 + e ^ 2)) in *.
  assert (form : forall u v, c * (b * u + a * v) ^ 2 + 2 * sG * u * v
    = c * (a ^ 2 + b ^ 2) / 2 * (u ^ 2 + v ^ 2) + (- d * (u ^ 2 - v ^ 2) + 2 * e * u * v))
    by (intros; unfold d, e; field).
  destruct (Req_dec (r - d) 0) as [Z|Z].
  - (* r = d, so e = 0 and d >= 0: the direction v *)
    exists 0, 1. split; [ring|]. rewrite form. assert (e ^ 2 = 0) by nra. nra.
  - (* the eigenvector (r - d, e), normalised *)
    assert (N : 0 < (r - d) ^ 2 + e ^ 2).
    { assert (0 < (r - d) ^ 2) by (rewrite <- Rsqr_pow2; apply Rlt_0_sqr; exact Z). pose proof (pow2_ge_0 e). lra. }
    pose proof (sqrt_lt_R0 _ N) as N0. pose proof (pow2_sqrt _ (Rlt_le _ _ N)) as N2.
    set (w := sqrt ((r - d) ^ 2 + e ^ 2)) in *.
    exists ((r - d) / w), (e / w).
    assert (S1 : ((r - d) / w) ^ 2 + (e / w) ^ 2 = 1).
    { replace (((r - d) / w) ^ 2 + (e / w) ^ 2) with (((r - d) ^ 2 + e ^ 2) / w ^ 2) by (field; lra).
      rewrite N2. field. lra. }
    split; [exact S1|]. rewrite form, S1.
    replace (- d * (((r - d) / w) ^ 2 - (e / w) ^ 2) + 2 * e * ((r - d) / w) * (e / w))
      with ((- d * ((r - d) ^ 2 - e ^ 2) + 2 * e ^ 2 * (r - d)) / w ^ 2) by (field; lra).
    replace (- d * ((r - d) ^ 2 - e ^ 2) + 2 * e ^ 2 * (r - d)) with (r * w ^ 2); [field; lra|].
    rewrite N2. assert (E2 : e ^ 2 = r ^ 2 - d ^ 2) by lra. rewrite E2. ring.
Qed.

(* the simpler and larger bound, equal at a = b *)
Lemma simple_above c a b sG : 0 <= c -> 0 <= sG ->
  lora_lambda c a b sG <= c * (a ^ 2 + b ^ 2) + sG /\
  (a = b -> 0 <= a -> lora_lambda c a b sG = c * (a ^ 2 + b ^ 2) + sG).
Proof.
  intros Hc Hs. unfold lora_lambda. pose proof (pow2_ge_0 a). pose proof (pow2_ge_0 b). pose proof (pow2_ge_0 (a - b)).
  assert (HS : 0 <= c * (a ^ 2 + b ^ 2)) by (apply Rmult_le_pos; lra). split.
  - enough (K : sqrt (c ^ 2 * (a ^ 2 - b ^ 2) ^ 2 / 4 + (c * a * b + sG) ^ 2) <= c * (a ^ 2 + b ^ 2) / 2 + sG) by lra.
    rewrite <- (sqrt_pow2 (c * (a ^ 2 + b ^ 2) / 2 + sG)) by lra. apply sqrt_le_1_alt.
    assert (0 <= c * sG * (a - b) ^ 2) by (apply Rmult_le_pos; [apply Rmult_le_pos|]; assumption). lra.
  - intros -> Hb. replace (c ^ 2 * (b ^ 2 - b ^ 2) ^ 2 / 4 + (c * b * b + sG) ^ 2) with ((c * b * b + sG) ^ 2) by field.
    assert (0 <= c * b * b) by (repeat apply Rmult_le_pos; assumption). rewrite sqrt_pow2 by lra. field.
Qed.

(* matrices: X, Y directions, BX and YA the products, G(Y X) the pairing; spectral bounds as hypotheses *)
Theorem lora_block : forall (VX VY VW : NormedModule R_AbsRing) (BX : VX -> VW) (YA : VY -> VW)
  (H : VW -> R) (GYX : VY -> VX -> R) (LW s a b gamma : R), 0 <= LW -> 0 <= s -> 0 <= a -> 0 <= b ->
  (forall w, H w <= LW * norm w ^ 2) ->
  (forall X, norm (BX X) <= b * norm X) -> (forall Y, norm (YA Y) <= a * norm Y) ->
  (forall Y X, Rabs (GYX Y X) <= gamma * (norm Y * norm X)) ->
  forall X Y, H (scal s (plus (BX X) (YA Y))) + 2 * s * GYX Y X
    <= lora_lambda (s ^ 2 * LW) a b (s * gamma) * (norm X ^ 2 + norm Y ^ 2).
Proof.
  intros VX VY VW BX YA H GYX LW s a b gamma HL Hs Ha Hb HH HB HA HG X Y.
  eapply Rle_trans; [|apply form_le]. unfold lora_form.
  pose proof (norm_ge_0 X) as PX. pose proof (norm_ge_0 Y) as PY.
  pose proof (HH (scal s (plus (BX X) (YA Y)))) as Q.
  assert (N : norm (scal s (plus (BX X) (YA Y))) <= s * (b * norm X + a * norm Y)).
  { eapply Rle_trans; [apply (norm_scal s)|]. unfold abs. simpl. rewrite Rabs_pos_eq by exact Hs.
    apply Rmult_le_compat_l; [exact Hs|]. eapply Rle_trans; [apply norm_triangle|].
    apply Rplus_le_compat; auto. }
  assert (N2 : norm (scal s (plus (BX X) (YA Y))) ^ 2 <= (s * (b * norm X + a * norm Y)) ^ 2)
    by (apply pow_incr; split; [apply norm_ge_0|exact N]).
  apply (Rmult_le_compat_l LW) in N2; [|exact HL].
  assert (D : s * GYX Y X <= s * (gamma * (norm Y * norm X)))
    by (apply Rmult_le_compat_l; [exact Hs|]; eapply Rle_trans; [apply Rle_abs|apply HG]).
  lra.
Qed.

(* the second derivative itself, in the scalar case: phi t = f (W + s (B + t Y)(A + t X)) *)
Theorem lora_second_derivative : forall (f f1 f2 : R -> R) (W s A B X Y : R),
  (forall w, is_derive f w (f1 w)) -> (forall w, is_derive f1 w (f2 w)) ->
  let w := fun t => W + s * ((B + t * Y) * (A + t * X)) in
  let phi1 := fun t => f1 (w t) * (s * (Y * (A + t * X) + (B + t * Y) * X)) in
  (forall t, is_derive (fun t => f (w t)) t (phi1 t)) /\
  is_derive phi1 0 (f2 (W + s * (B * A)) * (s * (B * X + Y * A)) ^ 2 + 2 * s * (f1 (W + s * (B * A)) * (Y * X))).
Proof.
  intros f f1 f2 W s A B X Y H1 H2 w phi1. split.
  - intros t. unfold phi1, w. auto_derive; [exists (f1 (W + s * ((B + t * Y) * (A + t * X)))); apply H1|].
    rewrite (is_derive_unique _ _ _ (H1 _)). ring.
  - unfold phi1, w. auto_derive.
    + exists (f2 (W + s * ((B + 0 * Y) * (A + 0 * X)))). apply H2.
    + rewrite (is_derive_unique (fun x => f1 x) _ _ (H2 _)). rewrite !Rmult_0_l, !Rplus_0_r. ring.
Qed.
