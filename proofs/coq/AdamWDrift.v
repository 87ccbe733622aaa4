(* T9: steady movement under AdamW of one coordinate with gradient 1 every p steps and 0 between (idle momentum,
   eps = 0, bias corrections gone). The periodic state of m and v, the movement per cycle in units of eta, and its
   limit sqrt p as beta2 -> 1. *)
From Coq Require Import Reals Lra Psatz Lia.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum.
Open Scope R_scope.

(* after an update m is periodic only if m = beta^p m + (1 - beta) *)
Lemma periodic_state beta p m : beta ^ p <> 1 -> m = beta ^ p * m + (1 - beta) -> m = (1 - beta) / (1 - beta ^ p).
Proof.
  intros Hb H. apply Rmult_eq_reg_r with (1 - beta ^ p); [|lra].
  replace ((1 - beta) / (1 - beta ^ p) * (1 - beta ^ p)) with (1 - beta) by (field; lra). lra.
Qed.

Lemma geometric r p : r <> 1 -> psum (fun k => r ^ k) p = (1 - r ^ p) / (1 - r).
Proof.
  intros Hr. induction p as [|p IH]; [simpl; field; lra|]. rewrite psum_S, IH. simpl. field. lra.
Qed.

Definition drift (beta1 beta2 : R) (p : nat) : R :=
  (1 - beta1) / (1 - beta1 ^ p) * sqrt ((1 - beta2 ^ p) / (1 - beta2))
  * ((1 - (beta1 / sqrt beta2) ^ p) / (1 - beta1 / sqrt beta2)).

Theorem adamw_drift : forall beta1 beta2 p m v,
  0 <= beta1 < 1 -> 0 < beta2 < 1 -> beta1 <> sqrt beta2 -> (0 < p)%nat ->
  m = beta1 ^ p * m + (1 - beta1) -> v = beta2 ^ p * v + (1 - beta2) ->
  psum (fun k => beta1 ^ k * m / sqrt (beta2 ^ k * v)) p = drift beta1 beta2 p.
Proof.
  intros beta1 beta2 p m v H1 H2 Hr Hp Hm Hv.
  assert (Q1 : beta1 ^ p <> 1).
  { destruct p as [|p]; [lia|]. simpl. assert (beta1 ^ p <= 1) by (rewrite <- (pow1 p); apply pow_incr; lra).
    assert (0 <= beta1 ^ p) by (apply pow_le; lra). nra. }
  assert (Q2 : beta2 ^ p < 1).
  { destruct p as [|p]; [lia|]. simpl. assert (beta2 ^ p <= 1) by (rewrite <- (pow1 p); apply pow_incr; lra).
    assert (0 <= beta2 ^ p) by (apply pow_le; lra). nra. }
  apply periodic_state in Hm; [|exact Q1]. apply periodic_state in Hv; [|lra].
  assert (S0 : 0 < sqrt beta2) by (apply sqrt_lt_R0; lra).
  assert (V0 : 0 < v) by (rewrite Hv; apply Rdiv_lt_0_compat; lra).
  assert (SV : 0 < sqrt v) by (apply sqrt_lt_R0; exact V0).
  assert (W : / sqrt v = sqrt ((1 - beta2 ^ p) / (1 - beta2))).
  { rewrite <- sqrt_inv. f_equal. rewrite Hv. field. lra. }
  rewrite (psum_ext _ (fun k => m / sqrt v * (beta1 / sqrt beta2) ^ k)).
  - rewrite psum_scal, geometric.
    + unfold drift. unfold Rdiv at 1. rewrite W, Hm. reflexivity.
    + intros E. apply Hr. apply Rmult_eq_reg_r with (/ sqrt beta2); [|apply Rinv_neq_0_compat; lra].
      unfold Rdiv in E. rewrite E. field. lra.
  - intros k _. rewrite sqrt_mult by (try apply pow_le; lra).
    replace (sqrt (beta2 ^ k)) with (sqrt beta2 ^ k).
    + unfold Rdiv at 3. rewrite Rpow_mult_distr, pow_inv. field. repeat split; try lra; apply pow_nonzero; lra.
    + induction k as [|k IH]; [simpl; symmetry; apply sqrt_1|]. simpl.
      rewrite IH, sqrt_mult by (try apply pow_le; lra). reflexivity.
Qed.

(* v's factor alone is what counts: (1 - beta2^p)/(1 - beta2) = 1 + beta2 + ... + beta2^(p-1) -> p *)
Theorem drift_limit : forall beta1 p, 0 <= beta1 < 1 -> (0 < p)%nat ->
  filterlim (fun beta2 => drift beta1 beta2 p) (at_left 1) (locally (sqrt (INR p))).
Proof.
  intros beta1 p H1 Hp.
  set (h := fun b => (1 - beta1) / (1 - beta1 ^ p) * sqrt (psum (fun k => b ^ k) p)
            * ((1 - (beta1 / sqrt b) ^ p) / (1 - beta1 / sqrt b))).
  assert (Q1 : beta1 ^ p <> 1).
  { destruct p as [|p]; [lia|]. simpl. assert (beta1 ^ p <= 1) by (rewrite <- (pow1 p); apply pow_incr; lra).
    assert (0 <= beta1 ^ p) by (apply pow_le; lra). nra. }
  assert (E : h 1 = sqrt (INR p)).
  { unfold h. rewrite sqrt_1. replace (beta1 / 1) with beta1 by field.
    rewrite (psum_ext _ (fun _ => 1)) by (intros; apply pow1). rewrite psum_const, Rmult_1_r. field. split; lra. }
  assert (C : continuous h 1).
  { assert (CS : continuous (fun b => psum (fun k => b ^ k) p) 1).
    { clear. induction p as [|p IH]; [apply continuous_const|].
      apply (continuous_plus (fun b => psum (fun k => b ^ k) p) (fun b => b ^ p) 1); [exact IH|].
      apply (ex_derive_continuous (fun b => b ^ p) 1). auto_derive. exact I. }
    assert (P0 : 0 < psum (fun k => 1 ^ k) p).
    { rewrite (psum_ext _ (fun _ => 1)) by (intros; apply pow1). rewrite psum_const, Rmult_1_r. apply lt_0_INR. exact Hp. }
    unfold h. apply (continuous_mult (fun b => (1 - beta1) / (1 - beta1 ^ p) * sqrt (psum (fun k => b ^ k) p))).
    - apply (continuous_mult (fun _ => (1 - beta1) / (1 - beta1 ^ p))); [apply continuous_const|].
      apply (continuous_comp (fun b => psum (fun k => b ^ k) p) sqrt); [exact CS|].
      apply continuous_sqrt.
    - apply (ex_derive_continuous (fun b => (1 - (beta1 / sqrt b) ^ p) / (1 - beta1 / sqrt b)) 1).
      auto_derive. rewrite sqrt_1. repeat split; try lra. }
  rewrite <- E.
  apply (filterlim_ext_loc h).
  - exists (mkposreal (1 / 2) ltac:(lra)). intros b Hb Hlt.
    assert (b <> 1) by lra. unfold h, drift. rewrite geometric by assumption. reflexivity.
  - apply (filterlim_filter_le_1 h) with (2 := C).
    intros P HP. unfold at_left, within. apply filter_imp with (2 := HP). auto.
Qed.
